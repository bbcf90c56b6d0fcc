"""Bitwise equality of what optimizers hold: states, options, and objects in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import FunctionType
from typing import Any

import torch

_PLAIN = (bool, int, float, complex, str, bytes)
"""Also where a class of its own adds attributes."""


def same_value(one: Any, other: Any) -> bool:
    """Return whether two values are bitwise equal, where all NaN are; objects if their attributes are."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_bits(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, FunctionType):
        return False  # a copy of a function is the function itself
    if isinstance(one, _PLAIN) or not hasattr(one, "__dict__"):
        return repr(one) == repr(other)  # so that NaN is NaN
    return same_value(vars(one), vars(other))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (one, other))):
        return True
    nan = one.isnan() & other.isnan()
    return bool(nan.any()) and _same_bits(one.masked_fill(nan, 0), other.masked_fill(nan, 0))
