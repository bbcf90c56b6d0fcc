"""Bitwise comparison of values of any kind."""

from __future__ import annotations

import contextlib
import math
import operator
from collections import deque
from collections.abc import Mapping
from types import MemberDescriptorType
from typing import Any

import torch

__all__ = ["attributes_of", "equal", "position_of"]


def equal(one: Any, other: Any, above: frozenset[int] = frozenset()) -> bool:
    """Compare bitwise. Objects without a usable ``==`` are equal if their attributes are."""
    if one is other or id(one) in above:  # it contains itself
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _equal_tensors(one, other)
    above |= {id(one)}
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[key], other[key], above) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(
            equal(first, second, above) for first, second in zip(one, other, strict=True)
        )
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    if "__eq__" not in {name for kind in type(one).__mro__[:-1] for name in vars(kind)}:
        same_place = position_of(one) == position_of(other)
        return same_place and equal(attributes_of(one), attributes_of(other), above)
    try:
        return _one_answer(one, other)
    except Exception:  # noqa: BLE001 - for example, == of a data class of tensors has no single answer
        return hasattr(one, "__dict__") and equal(vars(one), vars(other), above)


def attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes, including those in slots."""
    found = dict(getattr(value, "__dict__", None) or {})
    for kind in type(value).__mro__:
        for name, place in vars(kind).items() if "__slots__" in vars(kind) else ():
            if isinstance(place, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # the slot is empty
                    found[name] = place.__get__(value)
    return found


def position_of(value: Any) -> tuple[str, int] | None:
    """Return the position of one of Python's own iterators, if it shows it."""
    if not hasattr(type(value), "__next__") or type(value).__module__ not in ("builtins", "itertools"):
        return None
    told = repr(value) if "__repr__" in vars(type(value)) else ""
    return told, operator.length_hint(value)


def _one_answer(one: Any, other: Any) -> bool:
    same = one == other
    if hasattr(same, "all"):  # NumPy compares element by element, and NaN differs from itself
        same = (same | ((one != one) & (other != other))).all()  # noqa: PLR0124
    return bool(same)


def _equal_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    if one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_meta or torch.equal(one, other):
        return True
    floating = one.is_floating_point() or one.is_complex()
    return floating and torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)
