"""The compiled kernels for CPU tensors, called through ctypes (which drops the GIL meanwhile)."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from ddp_quant_hooks.messages import Layout

__all__ = ["CpuKernels", "library_path"]

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_FORMATS = {"int8": 0, "int4": 1, "bf16": 2, "fp16": 3}

_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIGNATURES = {
    # instruction set, threads, values, block size, ...
    "quant_encode": (_INT, _INT, _LONG, _LONG, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER),
    "quant_reduce": (_INT, _INT, _LONG, _LONG, _POINTER, _LONG, _INT, _POINTER, _INT, _POINTER, _POINTER),
    "quant_decode": (_INT, _INT, _LONG, _LONG, _POINTER, _LONG, _INT, _POINTER, _INT),
    "quant_instruction_set_available": (_INT,),
}


def library_path() -> Path:
    """Return where the library is: ``DDP_QUANT_HOOKS_LIBRARY``, or beside this file."""
    chosen = os.environ.get("DDP_QUANT_HOOKS_LIBRARY")
    return Path(chosen) if chosen else Path(__file__).with_name("cpu_kernels.so")


class CpuKernels:
    """One instruction set of the library.

    Args:
        instruction_set: As the library names it, e.g. ``"AVX2"``; ``None``: the best of this processor.

    Raises:
        OSError: The library is not there, or not for this platform.
        ValueError: This processor has no such instruction set.
    """

    def __init__(self, instruction_set: str | None = None) -> None:
        self._library = ctypes.CDLL(str(library_path()))
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        available = self._available()
        if instruction_set is None:
            instruction_set = next(iter(available))
        if instruction_set not in available:
            raise ValueError(f"this processor has {', '.join(available)}, not {instruction_set!r}")
        self.instruction_set = instruction_set
        """The one that runs."""
        self.available = list(available)
        """Those that this processor can run, the best first."""
        self._index = available[instruction_set]

    def _available(self) -> dict[str, int]:
        name = self._library.quant_instruction_set
        name.argtypes, name.restype = (_INT,), ctypes.c_char_p
        found: dict[str, int] = {}
        index = 0
        while (text := name(index)) is not None:
            if self._library.quant_instruction_set_available(index):
                found[text.decode()] = index
            index += 1
        return found

    def encode(
        self,
        values: torch.Tensor,
        message: torch.Tensor,
        layout: Layout,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor | None,
    ) -> None:
        """Write the message of ``values``; see :func:`ddp_quant_hooks.kernels.encode`."""
        self._call(
            "quant_encode",
            values.numel(),
            layout.block_size,
            values.data_ptr(),
            _DTYPES[values.dtype],
            message.data_ptr(),
            _FORMATS[layout.format],
            _address(residual),
            _address(new_residual),
        )

    def reduce(
        self,
        messages: list[torch.Tensor],
        layout: Layout,
        values: int,
        message: torch.Tensor,
        message_layout: Layout,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor | None,
    ) -> None:
        """Write the message of the mean; see :func:`ddp_quant_hooks.kernels.reduce`."""
        self._call(
            "quant_reduce",
            values,
            layout.block_size,
            _addresses(messages),
            len(messages),
            _FORMATS[layout.format],
            message.data_ptr(),
            _FORMATS[message_layout.format],
            _address(residual),
            _address(new_residual),
        )

    def decode(self, messages: list[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
        """Write the mean; see :func:`ddp_quant_hooks.kernels.decode`."""
        self._call(
            "quant_decode",
            values.numel(),
            layout.block_size,
            _addresses(messages),
            len(messages),
            _FORMATS[layout.format],
            values.data_ptr(),
            _DTYPES[values.dtype],
        )

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(self._index, torch.get_num_threads(), *arguments)
        if code != 0:
            raise RuntimeError(f"{name} failed with code {code}")


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _addresses(tensors: list[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (_POINTER * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
