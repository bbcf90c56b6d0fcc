"""Objects walked by their attributes, which are read and written without running the classes' code."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, UserDict, UserList
from types import BuiltinFunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any

__all__ = ["blank", "holds_attributes", "maker_of", "named_attributes", "set_attributes", "slot_places"]

_ATTRS_HASH = "_attrs_cached_hash"
"""Where the attrs package keeps a hash of the contents; ``None`` makes attrs compute it again."""

_PYDANTIC_MODELS = {("pydantic.main", "BaseModel"), ("pydantic.v1.main", "BaseModel")}


def holds_attributes(cls: type) -> bool:
    """Return whether objects of a class are containers because of their attributes."""
    return (
        dataclasses.is_dataclass(cls)
        or hasattr(cls, "__attrs_attrs__")
        or issubclass(cls, (SimpleNamespace, UserDict, UserList, ChainMap))
        # pydantic's models, known by name: the package need not be installed.
        or any((base.__module__, base.__qualname__) in _PYDANTIC_MODELS for base in cls.__mro__)
    )


def slot_places(cls: type) -> tuple[tuple[int, str], ...]:
    """Return the ``__slots__`` of a class: for each one the position of its base in the MRO, and its name.

    Includes slots of a base that a subclass hides. Holds no descriptors, because they would keep the class
    alive.
    """
    return tuple(
        (depth, name)
        for depth, base in enumerate(cls.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    )


def named_attributes(obj: Any, places: tuple[tuple[int, str], ...]) -> list[tuple[str, Any]]:
    """Return names and values of the attributes that are set: the instance's dictionary, then its slots."""
    own = _own_dict(obj)
    # Some dictionaries are their own __dict__: what is in them is walked as items.
    inside = [] if own is None or own is obj else list(own.items())
    return inside + [(member.__name__, value) for member, value in _filled_slots(obj, places)]


def set_attributes(new: Any, original: Any, values: list[Any], places: tuple[tuple[int, str], ...]) -> None:
    """Give a new object the original's attributes with other values, in :func:`named_attributes`' order."""
    own, count = _own_dict(original), 0
    if own is original and own is not None:
        object.__setattr__(new, "__dict__", new)
    elif own:
        count = len(own)
        # Bypass __setattr__, which frozen classes refuse and others use for computations.
        target = object.__getattribute__(new, "__dict__")
        target.update(zip(own, values[:count], strict=True))
        if _ATTRS_HASH in target:
            target[_ATTRS_HASH] = None
    for (member, _), value in zip(_filled_slots(original, places), values[count:], strict=True):
        member.__set__(new, None if member.__name__ == _ATTRS_HASH else value)


def maker_of(cls: type) -> type:
    """Return the class written in C, among the bases of ``cls``, whose ``__new__`` makes its objects."""
    return next(base for base in cls.__mro__ if isinstance(vars(base).get("__new__"), BuiltinFunctionType))


def blank(original: Any, maker: type, *safe: type) -> Any:
    """Return a new object of the original's class, without attributes, that no Python code has seen.

    Args:
        original: An instance.
        maker: From :func:`maker_of`.
        *safe: Built-in classes whose state the caller will restore.

    Raises:
        TypeError: The object has state in a class written in C, which a copy would lose.
    """
    cls = type(original)
    if maker is object:
        return object.__new__(cls)
    make: Any = vars(maker)["__new__"]
    if isinstance(original, BaseException):
        new = make(cls, *original.args)
        new.args, new.__cause__, new.__context__ = original.args, original.__cause__, original.__context__
        new.__suppress_context__ = original.__suppress_context__
        return new.with_traceback(original.__traceback__)
    if maker not in (SimpleNamespace, *safe):
        raise TypeError(
            f"a {cls.__qualname__} cannot be copied without its constructor, because it is also a "
            f"{maker.__name__}: use register_container with two functions"
        )
    return make(cls)


def _own_dict(obj: Any) -> dict[str, Any] | None:
    """Return the instance's own dictionary, never one from ``__getattr__`` or a wrapped object."""
    if not type(obj).__dictoffset__:
        return None
    own: dict[str, Any] = object.__getattribute__(obj, "__dict__")
    return own


def _filled_slots(obj: Any, places: tuple[tuple[int, str], ...]) -> list[tuple[Any, Any]]:
    filled, cls = [], type(obj)
    for depth, name in places:
        member = vars(cls.__mro__[depth])[name]
        try:
            filled.append((member, member.__get__(obj, cls)))
        except AttributeError:  # never set; hasattr would call __getattr__
            continue
    return filled
