"""Reduce operations: which there are, and how one rank reduces what it has of all ranks."""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch.distributed import ReduceOp

__all__ = ["ReduceOperation", "is_sum", "parse", "reduce_stacked", "scaled_for_sum"]

ReduceOperation: TypeAlias = ReduceOp | ReduceOp.RedOpType | str
"""What is accepted as a reduce operation: ``ReduceOp.SUM``, ``"sum"``, ..."""

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_BITWISE = {"BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor}
_NAMES = (*_SUMS, "MAX", "MIN", "PRODUCT", *_BITWISE)


def parse(op: ReduceOperation, tensor: torch.Tensor) -> tuple[str, Any]:
    """Return an operation's name and the factor of a ``PREMUL_SUM``.

    Raises:
        TypeError: ``op`` is no reduce operation, or does not work on the tensor's dtype.
    """
    given: Any = op  # whatever it claims to be
    factor = None
    if isinstance(given, str):
        name = given.upper()
    elif isinstance(given, ReduceOp.RedOpType):  # ReduceOp.SUM is one
        name = given.name
    elif isinstance(given, ReduceOp):
        state: Any = given.__getstate__()  # the operation, and the factor of a PREMUL_SUM
        name, factor = state[0].name, state[1]
    else:
        name = repr(given)
    if name not in _NAMES or (name == "PREMUL_SUM" and factor is None):
        raise TypeError(f"op must be a ReduceOp or one of {', '.join(_NAMES)} as a string, got {op!r}")
    numbers = tensor.is_floating_point() or tensor.is_complex()
    if name in _BITWISE and numbers:
        raise TypeError(f"{name} has no meaning for {tensor.dtype}, and no gradient")
    if name in ("MAX", "MIN") and tensor.is_complex():
        raise TypeError(f"{name} has no meaning for {tensor.dtype}: complex numbers have no order")
    return name, factor


def is_sum(name: str) -> bool:
    """Whether an operation is a sum of scaled inputs, which is linear."""
    return name in _SUMS


def scaled_for_sum(tensor: torch.Tensor, name: str, factor: Any) -> torch.Tensor:
    """Return what each rank adds to the sum."""
    return tensor * factor if name == "PREMUL_SUM" else tensor


def reduce_stacked(stacked: torch.Tensor, name: str) -> torch.Tensor:
    """Reduce over dimension 0, which has one entry per rank, in rank order."""
    if name == "PRODUCT":
        return stacked.prod(0, dtype=stacked.dtype)  # exact with zeros: never y / x
    if name in _BITWISE:
        return reduce(_BITWISE[name], stacked.unbind(0))
    extremum = torch.amax if name == "MAX" else torch.amin
    if not stacked.is_floating_point():
        return extremum(stacked, 0)
    # Where there is a NaN it is the result, and its holders share the gradient; torch would give all
    # inputs NaN. Elsewhere equal extrema share it.
    invalid = stacked.isnan()
    anywhere = invalid.any(0)
    share = invalid.sum(0).clamp(min=1).to(stacked.dtype)
    from_invalid = torch.where(invalid, stacked, 0).sum(0) / share
    return torch.where(anywhere, from_invalid, extremum(torch.where(anywhere, 0, stacked), 0))
