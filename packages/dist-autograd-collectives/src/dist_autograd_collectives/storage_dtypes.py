"""Dtypes that backends cannot send, or that torch can hardly compute with, such as float8 and uint16."""

from __future__ import annotations

import torch

__all__ = ["GLOO_DTYPES", "added", "summed", "wide_dtype"]

GLOO_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
"""The dtypes that Gloo's own collectives support in every torch version. Messages take any dtype."""

_COMPUTED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: ``dtype`` itself if torch has the operations."""
    if dtype in _COMPUTED:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def summed(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 0, in the dtype of ``rows``."""
    wide = wide_dtype(rows.dtype)
    return rows.to(wide).sum(0, dtype=wide).to(rows.dtype)


def added(first: torch.Tensor, second: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors, unseen by autograd, in memory that may be one of theirs."""
    first, second = first.detach(), second.detach()
    if wide_dtype(first.dtype) != first.dtype:
        return summed(torch.stack((first, second)))
    if into.is_inference():  # inference mode may have ended since
        return first + second
    return torch.add(first, second, out=into)
