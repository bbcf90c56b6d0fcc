"""The reduce operations, and how one rank reduces the values that it received from all ranks."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.storage_dtypes import wide_dtype

__all__ = ["ReduceOperation", "Reduction"]

ReduceOperation: TypeAlias = ReduceOp | ReduceOp.RedOpType | str
"""Anything accepted as a reduce operation: ``ReduceOp.SUM``, ``"sum"``, ..."""

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
_NAMES = (*_SUMS, "MAX", "MIN", "PRODUCT", *_BITWISE)


class Reduction(NamedTuple):
    """A reduce operation.

    Attributes:
        name: In torch's spelling, for example ``"SUM"``.
        factor: The factor of a ``PREMUL_SUM``.
    """

    name: str
    factor: Any = None

    @classmethod
    def parse(cls, op: ReduceOperation, tensor: torch.Tensor) -> Reduction:
        """Return the operation that the caller named.

        Raises:
            TypeError: ``op`` is not a reduce operation, or does not work on the tensor's dtype.
        """
        given: Any = op  # not trusted to be what the annotation says
        factor = None
        if isinstance(given, str):
            name = given.upper()
        elif isinstance(given, ReduceOp.RedOpType):  # such as ReduceOp.SUM
            name = given.name
        elif isinstance(given, ReduceOp):
            operation: Any = given
            state = operation.__getstate__()  # the operation, and the factor of a PREMUL_SUM
            name, factor = state[0].name, state[1]
        else:
            name = repr(given)
        if name not in _NAMES or (name == "PREMUL_SUM" and factor is None):
            raise TypeError(f"op must be a ReduceOp or one of {', '.join(_NAMES)} as a string, got {op!r}")
        if name in _BITWISE and _has_fractions(tensor):
            raise TypeError(f"{name} has no meaning for {tensor.dtype}, and no gradient")
        if name in ("MAX", "MIN") and tensor.is_complex():
            raise TypeError(f"{name} has no meaning for {tensor.dtype}: complex numbers have no order")
        if tensor.dtype is torch.bool:
            if name in ("AVG", "PREMUL_SUM"):
                raise TypeError(f"{name} has no meaning for {tensor.dtype}")
            name = {"SUM": "BOR", "PRODUCT": "BAND"}.get(name, name)
        if name == "PREMUL_SUM":
            factor = _factor(factor, tensor)
        return cls(name, factor)

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum of scaled inputs, and so linear."""
        return self.name in _SUMS

    def scaled(self, tensor: torch.Tensor, size: int) -> torch.Tensor:
        """Return this rank's summand in a sum over ``size`` ranks, which is finite if the mean is."""
        if self.name == "PREMUL_SUM":
            factor: torch.Tensor = self.factor
            return tensor.to(factor.dtype) * factor.to(tensor.device)
        if self.name != "AVG":
            return tensor
        if tensor.is_complex():
            return torch.complex(_share(tensor.real, size), _share(tensor.imag, size))
        return _share(tensor, size) if tensor.is_floating_point() else tensor.to(torch.int64)

    def finished(self, total: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the result for a sum of scaled tensors; a mean of integers is rounded towards zero."""
        if self.name == "AVG" and not _has_fractions(total):
            return torch.div(total, size, rounding_mode="trunc").to(dtype)
        return total.to(dtype)

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
