"""Built-in containers and their subclasses, accessed through the built-in class's own methods.

A subclass may override them, so nothing here calls a method of the object itself.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from reprlib import repr as short_repr
from typing import Any, NamedTuple

from dist_utils.containers.attribute_objects import blank, maker_of

__all__ = ["Content", "content_of", "indices"]


class Content(NamedTuple):
    """How to take the contents out of a built-in container, and how to make another one with new contents.

    Attributes:
        values: The contents that may be replaced.
        make: The original and new values -> a new container of its class, without attributes.
        names: The name of each value in a path.
        aside: The contents that are never replaced.
    """

    values: Callable[[Any], list[Any]]
    make: Callable[[Any, list[Any]], Any]
    names: Callable[[Any], list[str]]
    aside: Callable[[Any], list[Any]] = lambda _: []


def content_of(cls: type) -> Content | None:
    """Return the content of the built-in container that ``cls`` is or derives from."""
    return next((_CONTENTS[base] for base in cls.__mro__ if base in _CONTENTS), None)


def indices(values: Iterable[Any]) -> list[str]:
    """Return ``[0]``, ``[1]``, ..."""
    return [f"[{index}]" for index, _ in enumerate(values)]


def _dict_content(base: Any) -> Content:
    factory = vars(base).get("default_factory")

    def make(obj: Any, values: list[Any]) -> Any:
        new = blank(obj, maker_of(type(obj)), base, dict)
        for key, value in zip(base.keys(obj), values, strict=True):
            base.__setitem__(new, key, value)
        if factory is not None:
            factory.__set__(new, factory.__get__(obj))
        return new

    def aside(obj: Any) -> list[Any]:
        return [*base.keys(obj), *([] if factory is None else [factory.__get__(obj)])]

    return Content(
        values=lambda obj: list(base.values(obj)),
        make=make,
        names=lambda obj: [f"[{short_repr(key)}]" for key in base.keys(obj)],
        aside=aside,
    )


def _set_content(base: Any) -> Content:
    def make(obj: Any, values: list[Any]) -> Any:
        new = base.__new__(type(obj), values)
        if base is set:  # whose __new__ ignores the values
            set.update(new, values)
        if base.__len__(new) != len(values):
            raise ValueError(
                f"a {type(obj).__name__} of {len(values)} elements would shrink to {base.__len__(new)}, "
                "because fn returned equal objects for different ones"
            )
        return new

    return Content(
        values=lambda obj: list(base.__iter__(obj)),
        make=make,
        names=lambda obj: [f"{{{index}}}" for index in range(base.__len__(obj))],
    )


def _make_list(obj: Any, values: list[Any]) -> Any:
    if type(obj) is list:
        return values
    new = blank(obj, maker_of(type(obj)), list)
    list.extend(new, values)
    return new


def _make_deque(obj: Any, values: list[Any]) -> Any:
    new = blank(obj, maker_of(type(obj)), deque)
    deque.__init__(new, values, obj.maxlen)
    return new


_CONTENTS: dict[type, Content] = {
    OrderedDict: _dict_content(OrderedDict),
    defaultdict: _dict_content(defaultdict),
    dict: _dict_content(dict),
    list: Content(lambda obj: list(list.__iter__(obj)), _make_list, lambda obj: indices(list.__iter__(obj))),
    tuple: Content(
        lambda obj: list(tuple.__iter__(obj)),
        lambda obj, values: tuple.__new__(type(obj), values),
        lambda obj: indices(tuple.__iter__(obj)),
    ),
    set: _set_content(set),
    frozenset: _set_content(frozenset),
    deque: Content(
        lambda obj: list(deque.__iter__(obj)), _make_deque, lambda obj: indices(deque.__iter__(obj))
    ),
}
