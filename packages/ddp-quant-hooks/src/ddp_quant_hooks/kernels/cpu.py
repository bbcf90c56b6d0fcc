"""The compiled kernels for CPU tensors, called through ctypes (which drops the GIL meanwhile)."""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import torch

from ddp_quant_hooks.kernels.affine import affine_decode, affine_encode
from ddp_quant_hooks.kernels.call import KernelCall
from ddp_quant_hooks.kernels.low_rank import KERNELS, FactorCall
from ddp_quant_hooks.kernels.owned_files import refuse_foreign_file

LIBRARY_VARIABLE = "DDP_QUANT_HOOKS_LIBRARY"
"""The environment variable that names another library, such as one built with sanitizers."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {"int8": 0, "int4": 1, "fp16": 2, "int1": 3}

_ENCODE, _REDUCE, _DECODE = range(3)
_ABI = 6
_NO_MEMORY = 2


class _Work(ctypes.Structure):
    """The arguments of one call, as the library lays them out (csrc/cpu_kernels.cpp)."""

    _fields_ = (
        ("values", ctypes.c_int64),
        ("block", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("messages", ctypes.POINTER(ctypes.c_void_p)),
        ("ranks", ctypes.c_int64),
        ("format", ctypes.c_int),
        ("rotate", ctypes.c_int),
        ("message", ctypes.c_void_p),
        ("message_format", ctypes.c_int),
        ("message_rotate", ctypes.c_int),
        ("residual", ctypes.c_void_p),
        ("new_residual", ctypes.c_void_p),
    )


def library_path() -> Path:
    """Return where the library is: :data:`LIBRARY_VARIABLE`, or beside this file."""
    chosen = os.environ.get(LIBRARY_VARIABLE)
    return Path(chosen) if chosen else Path(__file__).with_name("cpu_kernels.so")


class CpuKernels:
    """One instruction set of the library.

    Args:
        instruction_set: As the library names it, e.g. ``"AVX2"``; ``None``: the best of this processor.

    Raises:
        OSError: The library is not there, not for this platform, or of another version; or the one that
            :data:`LIBRARY_VARIABLE` names can be changed by another user.
        ValueError: This processor has no such instruction set.
    """

    # PyTorch's numbers are computed by torch's operators.
    affine_encode = staticmethod(affine_encode)
    affine_decode = staticmethod(affine_decode)

    def __init__(self, instruction_set: str | None = None) -> None:
        path = library_path()
        if LIBRARY_VARIABLE in os.environ and path.exists():
            refuse_foreign_file(path)
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, "quant_abi") or self._library.quant_abi() != _ABI:
            raise OSError(f"{path} was built from other sources than this version's: install it again")
        self._library.quant_run.argtypes = (*(ctypes.c_int,) * 3, ctypes.POINTER(_Work))
        self._library.quant_low_rank.argtypes = (
            ctypes.c_int,
            ctypes.c_int,
            ctypes.POINTER(ctypes.c_int64),
            ctypes.c_int64,
        )
        self._library.quant_instruction_set.restype = ctypes.c_char_p
        names = iter(map(self._library.quant_instruction_set, itertools.count()).__next__, None)
        self.available = [name.decode() for name in names]
        """The instruction sets that this processor can run, the best first."""
        self.instruction_set = self.available[0] if instruction_set is None else instruction_set
        """The instruction set in use."""
        if self.instruction_set not in self.available:
            raise ValueError(f"this processor has {', '.join(self.available)}, not {instruction_set!r}")
        self._index = self.available.index(self.instruction_set)

    def describe(self) -> str:
        """Say what computes."""
        sets, threads = ", ".join(self.available), torch.get_num_threads()
        return f"compiled kernels with {self.instruction_set} (of {sets}), {threads} thread(s)"

    def run(self, call: KernelCall) -> None:
        """Do a call; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
        kernel = _ENCODE if not call.incoming else _REDUCE if call.outgoing else _DECODE
        work = _Work(block=call.layout.block_size, ranks=call.ranks)
        work.dtype = 0 if call.values is None else _DTYPES[call.values.dtype]
        work.format, work.rotate = _FORMATS[call.layout.format], call.layout.rotate
        work.message_format, work.message_rotate = _FORMATS[call.new_layout.format], call.new_layout.rotate
        threads = _thread_count()
        for index, shard in enumerate(call.shards()):
            work.values, work.tensor, work.message, work.residual, work.new_residual = shard
            if call.incoming:
                addresses = [message.data_ptr() for message in call.incoming[index]]
                work.messages = (ctypes.c_void_p * call.ranks)(*addresses)
            code = self._library.quant_run(kernel, self._index, threads, ctypes.byref(work))
            self._require_done(code)

    def run_on_factors(self, calls: Sequence[FactorCall]) -> None:
        """Do calls; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
        words = [
            word
            for call in calls
            for word in (KERNELS.index(call.kernel), _DTYPES[call.matrix.values.dtype], *call.words())
        ]
        tasks = (ctypes.c_int64 * len(words))(*words)
        self._require_done(self._library.quant_low_rank(self._index, _thread_count(), tasks, len(calls)))

    def _require_done(self, code: int) -> None:
        if code == _NO_MEMORY:
            raise MemoryError("the compiled kernels had no memory for their work")
        if code != 0:
            raise RuntimeError(f"the compiled kernels do not run with {self.instruction_set} here")


_of_thread = threading.local()
"""``count`` is what :func:`_thread_count` has found."""


def _thread_count() -> int:
    """Return how many threads a call may use: as many as torch's operators.

    Asking torch sets the number on the thread that asks, and with it the bits of later products there. The
    main thread has its number anyway; for any other, a thread of its own asks, once.
    """
    count: int | None = getattr(_of_thread, "count", None)
    if count is None:
        if threading.current_thread() is threading.main_thread():
            return torch.get_num_threads()
        found: list[int] = []
        asking = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        asking.start()
        asking.join()
        (count,) = found
        _of_thread.count = count
    return count
