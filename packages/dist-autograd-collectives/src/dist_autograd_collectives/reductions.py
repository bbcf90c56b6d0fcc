"""The reduce operations: their meaning for each dtype, and what one rank computes for them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch.distributed import ReduceOp

ReduceOperation: TypeAlias = ReduceOp | ReduceOp.RedOpType | str
"""Anything accepted as a reduce operation: ``ReduceOp.SUM``, ``"sum"``, ..."""

_BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
_ONE_BY_ONE = {"PRODUCT": operator.mul, **_BITWISE}
_IMPOSSIBLE = [("AVG", torch.bool), *((name, torch.uint64) for name in ("AVG", "MAX", "MIN"))]
_NAMES = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", *_BITWISE)


class Reduction(NamedTuple):
    """A reduce operation.

    Attributes:
        name: In torch's spelling, for example ``"SUM"``.
        size: The number of ranks.
        dtype: The tensors' dtype.
    """

    name: str
    size: int
    dtype: torch.dtype

    @classmethod
    def parse(cls, op: ReduceOperation, dtype: torch.dtype, size: int) -> Reduction:
        """Return the operation that the caller named.

        Raises:
            TypeError: ``op`` is not a reduce operation, or does not work on the dtype.
        """
        # An object around an operation has it as an attribute.
        kind = op if isinstance(op, (str, ReduceOp.RedOpType)) else getattr(op, "op", None)
        name = kind.upper() if isinstance(kind, str) else getattr(kind, "name", "")
        if name not in _NAMES:
            raise TypeError(f"op must be a ReduceOp or one of {', '.join(_NAMES)} as a string, got {op!r}")
        if name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
            raise TypeError(f"{name} has no meaning for {dtype}, and no gradient")
        if name in ("MAX", "MIN") and dtype.is_complex:
            raise TypeError(f"{name} has no meaning for {dtype}: complex numbers have no order")
        if (name, dtype) in _IMPOSSIBLE:
            raise TypeError(f"{name} has no meaning for {dtype}: torch cannot compute it")
        if dtype is torch.bool:
            name = {"SUM": "BOR", "PRODUCT": "BAND"}.get(name, name)
        return cls(name, size, dtype)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum of summands that are linear in the inputs."""
        return self.name in ("SUM", "AVG")

    def summand(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand in a sum over the ranks, which is finite if the mean is."""
        if self.name != "AVG":
            return tensor
        if tensor.is_complex():
            tensor = tensor.resolve_conj()  # vmap knows no imaginary part of a conjugate view
            return torch.complex(_share(tensor.real, self.size), _share(tensor.imag, self.size))
        return _share(tensor, self.size) if tensor.is_floating_point() else tensor.to(torch.int64)

    def result(self, total: torch.Tensor) -> torch.Tensor:
        """Return the result for the sum of the summands; a mean of integers is rounded towards zero."""
        if self.name != "AVG":
            return total
        if not (total.is_floating_point() or total.is_complex()):
            total = torch.div(total, self.size, rounding_mode="trunc")
        return total.to(self.dtype)

    def reduce(self, stacked: torch.Tensor) -> torch.Tensor:
        """Reduce over dimension 0, which has one entry per rank in rank order, if it is not a sum."""
        name, dtype = self.name, stacked.dtype
        if wide_dtype(dtype) != dtype:
            return self.reduce(stacked.to(wide_dtype(dtype))).to(dtype)
        if name in _ONE_BY_ONE:
            # Not torch.prod, whose gradient is y / x: wrong where y is 0 or infinite and x is not.
            return functools.reduce(_ONE_BY_ONE[name], stacked.unbind(0))
        extremum = torch.amax if name == "MAX" else torch.amin
        if not stacked.is_floating_point():
            return extremum(stacked, 0)
        # A NaN is the result, and the ranks that hold one share the gradient; torch would give all
        # inputs NaN. Otherwise equal extrema share it.
        invalid = stacked.isnan()
        anywhere = invalid.any(0)
        share = invalid.sum(0).clamp(min=1).to(stacked.dtype)
        from_invalid = torch.where(invalid, stacked, 0).sum(0, dtype=dtype) / share
        return torch.where(anywhere, from_invalid, extremum(torch.where(anywhere, 0, stacked), 0))


def _share(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """Return the summand for a mean of ``size`` real tensors: divided before it is rounded."""
    return tensor.to(wide_dtype(tensor.dtype)) / size


GLOO_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8),
)
"""The dtypes that Gloo's own collectives support in every torch version. Messages take any dtype."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute in: ``dtype`` itself if torch has the operations."""
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return torch.int64
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


def sum_of_parts(parts: Sequence[torch.Tensor], own: int, wide: torch.dtype) -> torch.Tensor:
    """Return the sum of all ranks' parts in rank order, unseen by autograd.

    Args:
        parts: Two or more. All but this rank's own are overwritten.
        own: The place of this rank's.
        wide: The dtype in which they are added, of :func:`dtype_of_sums`.
    """
    dtype, parts = parts[0].dtype, [part.to(wide) for part in parts]  # themselves, if that is theirs
    # The first two in either order are one sum: added up in memory of another rank's part.
    total, *others = parts if own else (parts[1], parts[0], *parts[2:])
    if total.is_inference() and not torch.is_inference_mode_enabled():  # the mode has ended since
        total = total.clone()
    for part in others:
        total.add_(part)
    return total.to(dtype)


def dtype_of_sums(dtype: torch.dtype, count: int) -> torch.dtype:
    """Return the dtype in which so many parts are added: fp32 for more than two of 16 bits."""
    short = dtype.is_floating_point and dtype.itemsize < 4 and count > 2
    return torch.float32 if short else wide_dtype(dtype)
