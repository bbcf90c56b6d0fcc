"""Memory for results, which is touched for the first time while they arrive.

That takes longer than to fill it: a copy of 64 MiB into new memory takes 48 ms in pages of 4 KiB, 25 in pages
of 2 MiB, and 15 into memory that was used before (two cores). Linux gives the large ones to those who ask.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["copy_of", "new_like", "new_rows"]

_WORTHWHILE = 4 << 20
"""From here on there is at least one whole large page in it."""


def new_rows(x: torch.Tensor, length: int) -> torch.Tensor:
    """Return memory for so many rows of a tensor."""
    return _in_large_pages(x.new_empty(length, *x.shape[1:]))


def new_like(x: torch.Tensor) -> torch.Tensor:
    """Return memory for a tensor of this shape."""
    return _in_large_pages(torch.empty_like(x))


def copy_of(x: torch.Tensor) -> torch.Tensor:
    """Return a copy."""
    return new_like(x).copy_(x)


def _in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    advise = _advice() if tensor.nbytes >= _WORTHWHILE and tensor.is_cpu else None
    if advise is not None:
        page = mmap.PAGESIZE
        first = -(-tensor.data_ptr() // page) * page
        length = (tensor.data_ptr() + tensor.nbytes - first) // page * page
        advise(first, length, mmap.MADV_HUGEPAGE)  # a wish: where it cannot be had all stays as it is
    return tensor


@functools.cache
def _advice() -> Callable[[int, int, int], Any] | None:
    """Return the system's call; ``None`` where there is none."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise
