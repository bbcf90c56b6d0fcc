"""Whether two values of whatever kind are the same, to the bit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

__all__ = ["equal"]


def equal(one: Any, other: Any, above: frozenset[int] = frozenset()) -> bool:
    """Compare to the bit. Objects without ``==`` are equal if their attributes are."""
    if one is other or id(one) in above:  # within itself
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _equal_tensors(one, other)
    above |= {id(one)}
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key], above) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(
            equal(first, second, above) for first, second in zip(one, other, strict=True)
        )
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
        return equal(getattr(one, "__dict__", None), getattr(other, "__dict__", None), above)
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)  # NumPy compares element by element


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.is_meta or torch.equal(one, other):
        return True
    floating = one.is_floating_point() or one.is_complex()
    return floating and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
