"""How each class of container is walked, including users' classes."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from dist_utils.containers.attribute_objects import (
    blank,
    holds_attributes,
    maker_of,
    named_attributes,
    set_attributes,
    slot_places,
)
from dist_utils.containers.builtin import Content, content_of, indices
from dist_utils.containers.special import SPECIAL

__all__ = ["LEAF", "TENSOR", "Kind", "kind_of", "register_container"]

T = TypeVar("T")


class Kind(NamedTuple):
    """What the walker needs to know about a class. Holds no reference to the class, which may be short-lived.

    Attributes:
        children: The objects inside, as a list.
        rebuild: The original and as many new children -> a new object.
        names: The name of each child in a path, such as ``[0]`` or ``.weight``.
        aside: What else the object holds and is never replaced, such as dictionary keys.
    """

    children: Callable[[Any], list[Any]]
    rebuild: Callable[[Any, list[Any]], Any]
    names: Callable[[Any], list[str]]
    aside: Callable[[Any], list[Any]] = lambda _: []


def _no_children(_: object) -> list[Any]:
    return []


TENSOR = Kind(_no_children, lambda obj, _: obj, _no_children)
LEAF = Kind(_no_children, lambda obj, _: obj, _no_children)

_registered: dict[type, Kind | None] = {}
"""What users registered; ``None`` for a class that is walked by its attributes."""
_known: WeakKeyDictionary[type, Kind] = WeakKeyDictionary()


def register_container(
    cls: type[T],
    flatten: Callable[[T], Iterable[Any]] | None = None,
    unflatten: Callable[[T, list[Any]], T] | None = None,
) -> None:
    """Tell every function of ``dist_utils`` that walks containers how to walk ``cls`` and its subclasses.

    Without the two functions an object is walked by its instance attributes, slots included: each may hold
    tensors, and a changed object is a shallow copy with the new attributes, made without calling
    ``__init__``. Registering a class again replaces its entry.

    Args:
        cls: The class.
        flatten: Returns what an object holds, in a fixed order.
        unflatten: Takes the original and the new contents, in that order, and returns a new object. Called
            only if at least one of them is a different object than before.

    Raises:
        TypeError: ``cls`` is not a class, or only one of the two functions is given.

    Example:
        >>> class Lazy:
        ...     def __init__(self, parts):
        ...         self.parts = parts
        >>> register_container(Lazy)
        >>> apply_to_tensors(torch.neg, Lazy([torch.ones(1)])).parts
        [tensor([-1.])]
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_container needs a class, got {cls!r}")
    if flatten is None and unflatten is None:
        _registered[cls] = None
    elif flatten is None or unflatten is None:
        raise TypeError("register_container needs both flatten and unflatten, or neither")
    else:
        take, put = flatten, unflatten
        _registered[cls] = Kind(lambda obj: list(take(obj)), put, lambda obj: indices(list(take(obj))))
    _known.clear()


def kind_of(cls: type) -> Kind:
    """Return how to walk objects of exactly this class."""
    kind = _known.get(cls)
    if kind is None:
        kind = _known[cls] = _find_kind(cls)
    return kind


def _find_kind(cls: type) -> Kind:
    content, places = content_of(cls), slot_places(cls)
    registered = next((base for base in cls.__mro__ if base in _registered), None)
    special = next((parts for fits, parts in SPECIAL if fits(cls)), None)
    if registered is not None:
        kind = _registered[registered] or _attribute_kind(content, places, maker_of(cls))
    elif issubclass(cls, torch.Tensor):
        kind = TENSOR
    elif issubclass(cls, (torch.nn.Module, enum.Enum)):  # shared by identity, never copied
        kind = LEAF
    elif special is not None:
        kind = Kind(*special)
    elif content is not None and not cls.__dictoffset__ and not places:
        kind = Kind(*content)
    elif content is not None or holds_attributes(cls):
        kind = _attribute_kind(content, places, maker_of(cls))
    else:
        kind = LEAF
    return kind


def _attribute_kind(content: Content | None, places: tuple[tuple[int, str], ...], maker: type) -> Kind:
    """Return the kind of objects with attributes, which may be built-in containers too."""

    def values(obj: Any) -> list[Any]:
        return content.values(obj) if content else []

    def rebuild(obj: Any, children: list[Any]) -> Any:
        inside = len(values(obj))
        new = content.make(obj, children[:inside]) if content else blank(obj, maker)
        set_attributes(new, obj, children[inside:], places)
        return new

    return Kind(
        children=lambda obj: values(obj) + [value for _, value in named_attributes(obj, places)],
        rebuild=rebuild,
        names=lambda obj: (
            (content.names(obj) if content else [])
            + [f".{name}" for name, _ in named_attributes(obj, places)]
        ),
        aside=content.aside if content else lambda _: [],
    )
