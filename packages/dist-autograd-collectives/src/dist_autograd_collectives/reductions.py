"""The reduce operations: their meaning for each dtype, and what one rank computes for them."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import ReduceOp

ReduceOperation: TypeAlias = ReduceOp | ReduceOp.RedOpType | str
"""Anything accepted as a reduce operation: ``ReduceOp.SUM``, ``"sum"``, ..."""

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
_IMPOSSIBLE = [("AVG", torch.bool), ("PREMUL_SUM", torch.bool), ("AVG", torch.uint64)]
_NAMES = (*_SUMS, "MAX", "MIN", "PRODUCT", *_BITWISE)


class Reduction(NamedTuple):
    """A reduce operation.

    Attributes:
        name: In torch's spelling, for example ``"SUM"``.
        size: The number of ranks.
        dtype: The tensors' dtype.
        factor: The factor of a ``PREMUL_SUM``.
    """

    name: str
    size: int
    dtype: torch.dtype
    factor: Any = None

    @classmethod
    def parse(cls, op: ReduceOperation, tensor: torch.Tensor, size: int) -> Reduction:
        """Return the operation that the caller named.

        Raises:
            TypeError: ``op`` is not a reduce operation, or does not work on the tensor's dtype.
        """
        name, factor = _named(op)
        if name in _BITWISE and _has_fractions(tensor):
            raise TypeError(f"{name} has no meaning for {tensor.dtype}, and no gradient")
        if name in ("MAX", "MIN") and tensor.is_complex():
            raise TypeError(f"{name} has no meaning for {tensor.dtype}: complex numbers have no order")
        if (name, tensor.dtype) in _IMPOSSIBLE:
            raise TypeError(f"{name} has no meaning for {tensor.dtype}: torch cannot compute it")
        if tensor.dtype is torch.bool:
            name = {"SUM": "BOR", "PRODUCT": "BAND"}.get(name, name)
        if name == "PREMUL_SUM":
            factor = _factor(factor, tensor)
        return cls(name, size, tensor.dtype, factor)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum of scaled inputs, and so linear."""
        return self.name in _SUMS

    def scaled(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand in a sum over the ranks, which is finite if the mean is."""
        if self.name == "PREMUL_SUM":
            factor: torch.Tensor = self.factor
            return tensor.to(factor.dtype) * factor.to(tensor.device)
        if self.name != "AVG":
            return tensor
        if tensor.is_complex():
            return torch.complex(_share(tensor.real, self.size), _share(tensor.imag, self.size))
        return _share(tensor, self.size) if tensor.is_floating_point() else tensor.to(torch.int64)

    def finished(self, total: torch.Tensor) -> torch.Tensor:
        """Return the result for a sum of scaled tensors; a mean of integers is rounded towards zero."""
        if self.name == "AVG" and not _has_fractions(total):
            return torch.div(total, self.size, rounding_mode="trunc").to(self.dtype)
        return total.to(self.dtype)

    def reduced(self, stacked: torch.Tensor) -> torch.Tensor:
        """Reduce over dimension 0, which has one entry per rank in rank order, if it is not a sum."""
        name, dtype = self.name, stacked.dtype
        if wide_dtype(dtype) != dtype and not (dtype is torch.uint64 and name in ("MAX", "MIN")):
            return self.reduced(stacked.to(wide_dtype(dtype))).to(dtype)
        if name == "PRODUCT":
            # Not torch.prod, whose gradient is y / x: wrong where y is 0 or infinite and x is not.
            return reduce(operator.mul, stacked.unbind(0))
        if name in _BITWISE:
            return reduce(_BITWISE[name], stacked.unbind(0))
        extremum = torch.amax if name == "MAX" else torch.amin
        if dtype is torch.uint64:  # no wider integer exists: shifted so that signed order is unsigned order
            half = torch.iinfo(torch.int64).min
            return (extremum(stacked.view(torch.int64) ^ half, 0) ^ half).view(dtype)
        if not stacked.is_floating_point():
            return extremum(stacked, 0)
        # A NaN is the result, and the ranks that hold one share the gradient; torch would give all
        # inputs NaN. Otherwise equal extrema share it.
        invalid = stacked.isnan()
        anywhere = invalid.any(0)
        share = invalid.sum(0).clamp(min=1).to(stacked.dtype)
        from_invalid = torch.where(invalid, stacked, 0).sum(0, dtype=dtype) / share
        return torch.where(anywhere, from_invalid, extremum(torch.where(anywhere, 0, stacked), 0))


def _named(op: Any) -> tuple[str, Any]:
    """Return the name in torch's spelling, and the factor of a PREMUL_SUM; raises if it is no operation."""
    name, factor = "", None
    if isinstance(op, str):
        name = op.upper()
    elif isinstance(op, ReduceOp.RedOpType):  # such as ReduceOp.SUM
        name = op.name
    elif isinstance(op, ReduceOp):
        operation: Any = op
        kind, factor = operation.__getstate__()[:2]
        name = kind.name
    if name not in _NAMES or (name == "PREMUL_SUM" and factor is None):
        raise TypeError(f"op must be a ReduceOp or one of {', '.join(_NAMES)} as a string, got {op!r}")
    return name, factor


def _share(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the summand for a mean of ``size`` real tensors: divided before it is rounded."""
    return tensor.to(wide_dtype(tensor.dtype)) / size


def _factor(given: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a factor in the dtype of the tensor it multiplies; raises if it does not fit."""
    # Not in the default dtype, which would round a factor meant for float64.
    factor = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, dtype=torch.float64)
    wide = wide_dtype(tensor.dtype)
    if (
        factor.numel() != 1
        or (factor.is_complex() and not tensor.is_complex())
        or (not _has_fractions(tensor) and bool((factor != factor.to(wide)).any()))
    ):
        raise TypeError(f"PREMUL_SUM of {tensor.dtype} cannot have the factor {given!r}")
    return factor.reshape(()).to(wide)


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


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


def sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Return the sum over dimension 0, in the dtype of ``rows``."""
    wide = wide_dtype(rows.dtype)
    return rows.to(wide).sum(0, dtype=wide).to(rows.dtype)


def sum_of_two(first: torch.Tensor, second: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Return the sum of two tensors, unseen by autograd, in memory that may be one of theirs."""
    first, second = first.detach(), second.detach()
    if wide_dtype(first.dtype) != first.dtype:
        return sum_of_rows(torch.stack((first, second)))
    if into.is_inference():  # inference mode may have ended since
        return first + second
    return torch.add(first, second, out=into)


def padded_parts(x: torch.Tensor, count: int) -> torch.Tensor:
    """Return all elements in rows of one length, padded with zeros at the end."""
    length = -(-x.numel() // count)
    padded = torch.nn.functional.pad(x.flatten(), (0, length * count - x.numel()))
    return padded.view(count, length)


def zeros_after(received: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return zeros that depend on what a collective gave this rank, though no element of it is used.

    So its backward, which the other ranks wait for, runs on this rank, and no compiler optimizes it away.
    """
    wide = wide_dtype(like.dtype)
    zeros = torch.zeros_like(like, dtype=wide, memory_format=torch.contiguous_format, requires_grad=False)
    return (zeros + received.flatten()[:0].to(wide).sum(dtype=wide)).to(like.dtype)
