"""Checks of data from a file: types first, because comparing unknown objects may raise any error."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["alike", "dict_of", "list_of", "named_lengths", "whole_number"]

T = TypeVar("T")


def alike(one: object, other: object) -> bool:
    """Return whether two values are plain, equal and of the same types. One of them may be anything."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    return isinstance(one, (str, int, float, bool, type(None))) and one == other


def whole_number(value: Any, name: str) -> int:
    """Return a whole number that is not negative. Raises ``TypeError`` for anything else."""
    if type(value) is not int or value < 0:
        raise TypeError(f"{name} must be a whole number of at least 0, got {value!r:.200}")
    return value


def list_of(value: Any, kind: type[T], name: str) -> list[T]:
    """Return a list or tuple of things of a type. Raises ``TypeError`` for anything else."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, kind) for one in value):
        raise TypeError(f"{name} must be a list of {kind.__name__}, got {value!r:.200}")
    return list(value)


def dict_of(value: Any, kind: type[T] | tuple[type[T], ...], name: str, *, keys: type = str) -> dict[Any, T]:
    """Return a dict with values of a type. Raises ``TypeError`` for anything else."""
    if not isinstance(value, dict) or not all(
        type(key) is keys and isinstance(one, kind) for key, one in value.items()
    ):
        raise TypeError(f"{name} has keys or values of a wrong type: got {value!r:.200}")
    return value


def named_lengths(value: Any, name: str) -> list[tuple[str, int]]:
    """Return pairs of a name and a number. Raises ``TypeError`` for anything else."""
    pairs = [tuple(list_of(pair, object, name)) for pair in list_of(value, object, name)]
    if not all(len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise TypeError(f"{name} must be pairs of a name and a length, got {value!r:.200}")
    return [(str(first), whole_number(second, name)) for first, second in pairs]
