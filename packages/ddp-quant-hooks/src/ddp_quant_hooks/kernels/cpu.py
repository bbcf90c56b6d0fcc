"""The compiled kernels for CPU tensors, called through ctypes (which drops the GIL meanwhile)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ddp_quant_hooks.kernels.backends import Outgoing
from ddp_quant_hooks.kernels.owned_files import refuse_foreign_file
from ddp_quant_hooks.wire_format import Layout

__all__ = ["LIBRARY_VARIABLE", "CpuKernels", "library_path"]

LIBRARY_VARIABLE = "DDP_QUANT_HOOKS_LIBRARY"
"""The environment variable that names another library, such as one built with sanitizers."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {"int8": 0, "int4": 1, "bf16": 2, "fp16": 3}

_ENCODE, _REDUCE, _DECODE = range(3)
_ABI = 2
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
        ("residual_dtype", ctypes.c_int),
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

    def __init__(self, instruction_set: str | None = None) -> None:
        path = library_path()
        if LIBRARY_VARIABLE in os.environ and path.exists():
            refuse_foreign_file(path)
        self._library = ctypes.CDLL(str(path))
        if not hasattr(self._library, "quant_abi") or self._library.quant_abi() != _ABI:
            raise OSError(f"{path} was built from other sources than this version's: install it again")
        self._library.quant_run.argtypes = (*(ctypes.c_int,) * 3, ctypes.POINTER(_Work))
        available = self._available()
        if instruction_set is None:
            instruction_set = next(iter(available))
        if instruction_set not in available:
            raise ValueError(f"this processor has {', '.join(available)}, not {instruction_set!r}")
        self.instruction_set = instruction_set
        """The instruction set in use."""
        self.available = list(available)
        """The instruction sets that this processor can run, the best first."""
        self._index = available[instruction_set]

    def _available(self) -> dict[str, int]:
        name = self._library.quant_instruction_set
        name.argtypes, name.restype = (ctypes.c_int,), ctypes.c_char_p
        found: dict[str, int] = {}
        index = 0
        while (text := name(index)) is not None:
            if self._library.quant_instruction_set_available(index):
                found[text.decode()] = index
            index += 1
        return found

    def encode(self, shards: Sequence[tuple[torch.Tensor, Outgoing]], layout: Layout) -> None:
        """Write the message of each shard; see :func:`ddp_quant_hooks.kernels.encode_shards`."""
        for values, out in shards:
            work = _Work(values=values.numel(), block=layout.block_size)
            work.tensor, work.dtype = values.data_ptr(), _DTYPES[values.dtype]
            _write_to(work, out, layout)
            self._run(_ENCODE, work)

    def reduce(
        self, messages: Sequence[torch.Tensor], layout: Layout, values: int, out: Outgoing, new_layout: Layout
    ) -> None:
        """Write the message of the mean; see :func:`ddp_quant_hooks.kernels.reduce`."""
        work = _Work(values=values, block=layout.block_size)
        _read_from(work, messages, layout)
        _write_to(work, out, new_layout)
        self._run(_REDUCE, work)

    def decode(self, shards: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], layout: Layout) -> None:
        """Write the mean of each shard; see :func:`ddp_quant_hooks.kernels.decode_shards`."""
        for messages, values in shards:
            work = _Work(values=values.numel(), block=layout.block_size)
            _read_from(work, messages, layout)
            work.tensor, work.dtype = values.data_ptr(), _DTYPES[values.dtype]
            self._run(_DECODE, work)

    def _run(self, kernel: int, work: _Work) -> None:
        code = self._library.quant_run(kernel, self._index, torch.get_num_threads(), ctypes.byref(work))
        if code == _NO_MEMORY:
            raise MemoryError("the compiled kernels had no memory for their threads")
        if code != 0:
            raise RuntimeError(f"the compiled kernels do not run with {self.instruction_set} here")


def _read_from(work: _Work, messages: Sequence[torch.Tensor], layout: Layout) -> None:
    work.messages = (ctypes.c_void_p * len(messages))(*(message.data_ptr() for message in messages))
    work.ranks, work.format, work.rotate = len(messages), _FORMATS[layout.format], layout.rotate


def _write_to(work: _Work, out: Outgoing, layout: Layout) -> None:
    work.message, work.residual, work.new_residual = out.addresses()
    work.message_format, work.message_rotate = _FORMATS[layout.format], layout.rotate
    work.residual_dtype = _DTYPES[out.residual_dtype or torch.float32]
