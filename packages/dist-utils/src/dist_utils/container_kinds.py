"""How each kind of container is taken apart and put together again, never through its constructor."""

from __future__ import annotations

import dataclasses
import enum
import gc
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from types import BuiltinFunctionType, MappingProxyType, MemberDescriptorType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["LEAF", "TENSOR", "Kind", "kind_of", "register_container", "slots_of"]

T = TypeVar("T")


class Kind(NamedTuple):
    """What the walker needs to know about a class.

    Attributes:
        children: The objects inside, as a list.
        rebuild: The original and as many new children -> a new object.
        names: How a path calls each child, as in ``[0]`` or ``.weight``.
    """

    children: Callable[[Any], list[Any]]
    rebuild: Callable[[Any, list[Any]], Any]
    names: Callable[[Any], list[str]]


def _no_children(_: object) -> list[Any]:
    return []


TENSOR = Kind(_no_children, lambda obj, _: obj, _no_children)
LEAF = Kind(_no_children, lambda obj, _: obj, _no_children)

_registered: dict[type, Kind | None] = {}
"""What users registered; ``None`` for a class that is seen as its attributes."""
_known: WeakKeyDictionary[type, Kind] = WeakKeyDictionary()


def register_container(
    cls: type[T],
    flatten: Callable[[T], Iterable[Any]] | None = None,
    unflatten: Callable[[T, list[Any]], T] | None = None,
) -> None:
    """Tell every function of ``dist_utils`` that walks containers how to walk ``cls`` and its subclasses.

    Without the two functions an object is seen as its instance attributes, slots included: each may hold
    tensors, and a changed object is a shallow copy with the new attributes, made without a call of
    ``__init__``. A class registered again is replaced.

    Args:
        cls: The class.
        flatten: Returns what an object holds, in a fixed order.
        unflatten: Takes the original and the new contents, in that order, and returns a new object. Called
            only if one of them is another object than before.

    Raises:
        TypeError: ``cls`` is no class, or only one of the two functions is given.

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
        _registered[cls] = Kind(lambda obj: list(take(obj)), put, lambda obj: _indices(list(take(obj))))
    _known.clear()


def kind_of(cls: type) -> Kind:
    """Return how to walk objects of exactly this class."""
    kind = _known.get(cls)
    if kind is None:
        kind = _known[cls] = _find_kind(cls)
    return kind


def _find_kind(cls: type) -> Kind:
    registered = next((base for base in cls.__mro__ if base in _registered), None)
    if registered is not None:
        return _registered[registered] or _attribute_kind(cls)
    special = next((kind for kind, fits in _SPECIAL if fits(cls)), None)
    if special is not None:
        return special
    content = _content_of(cls)
    if content is not None and not cls.__dictoffset__ and not slots_of(cls):
        return Kind(content.values, content.make, content.names)
    if content is not None or _is_attribute_object(cls):
        return _attribute_kind(cls)
    return LEAF


def _is_attribute_object(cls: type) -> bool:
    return (
        dataclasses.is_dataclass(cls)
        or hasattr(cls, "__attrs_attrs__")
        or issubclass(cls, (SimpleNamespace, UserDict, UserList))
    )


# Contents of the built-in containers and of their subclasses: read and written by the built-in class's own
# methods, because a subclass may override them.


class _Content(NamedTuple):
    values: Callable[[Any], list[Any]]
    make: Callable[[Any, list[Any]], Any]
    names: Callable[[Any], list[str]]


def _blank(cls: type) -> Any:
    """Return a new object of ``cls`` without running any Python code of the class."""
    for base in cls.__mro__:
        new = vars(base).get("__new__")
        if isinstance(new, BuiltinFunctionType):
            return new(cls)
    raise TypeError(f"cannot make a {cls.__qualname__} without its constructor")


def _indices(values: Iterable[Any]) -> list[str]:
    return [f"[{index}]" for index, _ in enumerate(values)]


def _make_list(obj: list[Any], values: list[Any]) -> list[Any]:
    if type(obj) is list:
        return values
    new: list[Any] = _blank(type(obj))
    list.extend(new, values)
    return new


def _make_tuple(obj: tuple[Any, ...], values: list[Any]) -> tuple[Any, ...]:
    return tuple.__new__(type(obj), values)


_FACTORY: Any = vars(defaultdict)["default_factory"]


def _dict_content(base: Any) -> _Content:
    def make(obj: dict[Any, Any], values: list[Any]) -> dict[Any, Any]:
        new: dict[Any, Any] = _blank(type(obj))
        for key, value in zip(base.keys(obj), values, strict=True):
            base.__setitem__(new, key, value)
        if base is defaultdict:
            _FACTORY.__set__(new, _FACTORY.__get__(obj))
        return new

    return _Content(
        values=lambda obj: list(base.values(obj)),
        make=make,
        names=lambda obj: [f"[{key!r}]" for key in base.keys(obj)],
    )


def _set_content(base: Any) -> _Content:
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

    return _Content(values=list, make=make, names=lambda obj: [f"{{{index}}}" for index in range(len(obj))])


def _make_deque(obj: deque[Any], values: list[Any]) -> deque[Any]:
    new: deque[Any] = _blank(type(obj))
    deque.__init__(new, values, obj.maxlen)
    return new


_CONTENTS: dict[type, _Content] = {
    OrderedDict: _dict_content(OrderedDict),
    defaultdict: _dict_content(defaultdict),
    dict: _dict_content(dict),
    list: _Content(lambda obj: list(list.__iter__(obj)), _make_list, _indices),
    tuple: _Content(lambda obj: list(tuple.__iter__(obj)), _make_tuple, _indices),
    set: _set_content(set),
    frozenset: _set_content(frozenset),
    deque: _Content(lambda obj: list(deque.__iter__(obj)), _make_deque, _indices),
}


def _content_of(cls: type) -> _Content | None:
    return next((_CONTENTS[base] for base in cls.__mro__ if base in _CONTENTS), None)


# Objects with attributes.


def slots_of(cls: type) -> dict[str, Any]:
    """Return the descriptors of all ``__slots__`` of a class and its bases, by name."""
    return {
        name: member
        for base in reversed(cls.__mro__)
        if "__slots__" in vars(base)
        for name, member in vars(base).items()
        if isinstance(member, MemberDescriptorType)
    }


def _attribute_kind(cls: type) -> Kind:
    """Return the kind of objects with attributes, which may be built-in containers too."""
    content, slots = _content_of(cls), slots_of(cls)

    def attributes(obj: Any) -> dict[str, Any]:
        return getattr(obj, "__dict__", {})

    def filled(obj: Any) -> list[str]:
        return [name for name in slots if hasattr(obj, name)]

    def children(obj: Any) -> list[Any]:
        found = content.values(obj) if content else []
        found += attributes(obj).values()
        return found + [slots[name].__get__(obj) for name in filled(obj)]

    def rebuild(obj: Any, values: list[Any]) -> Any:
        left = iter(values)
        inside = len(content.values(obj)) if content else 0
        new = content.make(obj, list(islice(left, inside))) if content else _blank(cls)
        # Past __setattr__, which frozen classes refuse and others use to compute.
        if own := attributes(obj):
            attributes(new).update(zip(own, islice(left, len(own)), strict=True))
        for name, value in zip(filled(obj), left, strict=True):
            slots[name].__set__(new, value)
        return new

    def names(obj: Any) -> list[str]:
        inside = content.names(obj) if content else []
        return inside + [f".{name}" for name in (*attributes(obj), *filled(obj))]

    return Kind(children, rebuild, names)


# Kinds of their own.


def _rebuild_packed_sequence(obj: PackedSequence, values: list[Any]) -> PackedSequence:
    (data,) = values
    indices: list[torch.Tensor | None] = [obj.sorted_indices, obj.unsorted_indices]
    if isinstance(data, torch.Tensor):  # they belong where the data is
        indices = [index if index is None else index.to(data.device) for index in indices]
    return tuple.__new__(type(obj), (data, obj.batch_sizes, *indices))


def _rebuild_structseq(obj: Any, values: list[Any]) -> Any:
    cls, (_, hidden) = obj.__reduce__()  # hidden: fields that have a name but no index
    return cls(values, hidden)


def _tensordict_children(obj: Any) -> list[Any]:
    return [obj.get(key) for key in _tensordict_keys(obj)]


def _tensordict_keys(obj: Any) -> list[Any]:
    return list(obj.keys(include_nested=True, leaves_only=True))


def _rebuild_tensordict(obj: Any, values: list[Any]) -> Any:
    new = obj.clone(recurse=False).clear_device_()  # with a device it would move what is put in
    if new.is_locked:
        new.unlock_()
    for key, value in zip(_tensordict_keys(obj), values, strict=True):
        new.set(key, value)
    devices = {value.device for value in values if isinstance(value, torch.Tensor)}
    if obj.device is not None and len(devices) == 1:
        new = new.to(devices.pop())
    return new.lock_() if obj.is_locked else new


def _is_tensordict(cls: type) -> bool:
    # By name: the package need not be installed.
    return bool(cls.__dict__.get("_is_tensorclass")) or any(
        (base.__module__, base.__qualname__) == ("tensordict.base", "TensorDictBase") for base in cls.__mro__
    )


# First match wins.
_SPECIAL: list[tuple[Kind, Callable[[type], bool]]] = [
    (TENSOR, lambda cls: issubclass(cls, torch.Tensor)),
    # Shared by identity, never copied.
    (LEAF, lambda cls: issubclass(cls, (torch.nn.Module, enum.Enum))),
    (
        # The lengths stay on the CPU and the indices follow the data: neither is for fn to compute with.
        Kind(lambda obj: [obj.data], _rebuild_packed_sequence, lambda _: [".data"]),
        lambda cls: issubclass(cls, PackedSequence),
    ),
    (
        Kind(list, _rebuild_structseq, _indices),
        lambda cls: issubclass(cls, tuple) and hasattr(cls, "n_sequence_fields"),
    ),
    (
        # The mapping behind it, with its own type; nothing else gives it out.
        Kind(gc.get_referents, lambda _, values: MappingProxyType(values[0]), lambda _: [".mapping"]),
        lambda cls: cls is MappingProxyType,
    ),
    (
        Kind(
            _tensordict_children,
            _rebuild_tensordict,
            lambda obj: [f"[{key!r}]" for key in _tensordict_keys(obj)],
        ),
        _is_tensordict,
    ),
]
