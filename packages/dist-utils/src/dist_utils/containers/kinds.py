"""How each class of container is taken apart and made again, including users' classes."""

from __future__ import annotations

import contextlib
import enum
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterable
from types import MemberDescriptorType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")

_Functions = tuple[Callable[[Any], Iterable[Any]], Callable[[Any, list[Any]], Any]]

_WITH_ITEMS = (list, tuple, set, frozenset, deque, dict, defaultdict, OrderedDict)
_BUILT_IN = (*_WITH_ITEMS, SimpleNamespace, object)
"""Classes whose ``__new__`` makes objects of users' classes."""

_MARKS = ("__dataclass_fields__", "__attrs_attrs__", "__pydantic_fields_set__")
"""Names in classes whose objects are containers because of their attributes."""

REGISTERED: dict[type, _Functions | None] = dict.fromkeys((ChainMap, SimpleNamespace, UserDict, UserList))
"""Classes to walk by two functions; ``None`` for those that are walked by their attributes."""


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

        A ``TensorDict`` (nested ones are its contents), and with it every tensorclass::

            def unflatten(old, values):
                return TensorDict(dict(zip(old.keys(), values, strict=True)), old.batch_size)

            register_container(TensorDict, lambda old: old.values(), unflatten)
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_container needs a class, got {cls!r}")
    if (flatten is None) != (unflatten is None):
        raise TypeError("register_container needs both flatten and unflatten, or neither")
    REGISTERED[cls] = None if flatten is None or unflatten is None else (flatten, unflatten)
    KINDS.clear()


class Kind:
    """How objects of one class are walked: their items, as those of a list, and then their attributes.

    The methods of built-in classes read and write the items, and those of ``object`` the attributes, so that
    no code of a user's class runs.
    """

    def __init__(self, cls: type, functions: _Functions | None = None) -> None:
        self.base: Any = next(base for base in cls.__mro__ if base in _BUILT_IN)
        self.flatten, self.unflatten = functions or (self._items, self._with_items)
        self.is_dict = functions is None and issubclass(self.base, dict)
        self.has_dict = functions is None and cls.__dictoffset__ != 0
        # Those of built-in classes too: the factory of a defaultdict is one.
        self.slots = [
            member
            for base in cls.__mro__
            for name, member in vars(base).items()
            if functions is None and isinstance(member, MemberDescriptorType) and name != "__dict__"
        ]

    def children(self, obj: Any) -> list[Any]:
        """Return what an object holds."""
        return [*self.flatten(obj), *self.attributes(obj).values()]

    def rebuild(self, obj: Any, children: list[Any]) -> Any:
        """Return a new object with other children than the original's."""
        attributes = self.attributes(obj)
        first = len(children) - len(attributes)
        new = self.unflatten(obj, children[:first])
        own = object.__getattribute__(new, "__dict__") if self.has_dict else {}  # past properties
        for key, value in zip(attributes, children[first:], strict=True):
            if isinstance(key, str):
                own[key] = value
            else:
                key.__set__(new, value)
        if self.has_dict and object.__getattribute__(obj, "__dict__") is obj:
            object.__setattr__(new, "__dict__", new)
        return new

    def attributes(self, obj: Any) -> dict[str | MemberDescriptorType, Any]:
        """Return the attributes of an object: by name, and what is in slots by its slot."""
        own = object.__getattribute__(obj, "__dict__") if self.has_dict else {}
        attributes = {} if own is obj else {**own}  # by the recipe ``self.__dict__ = self`` it has the items
        for slot in self.slots:
            with contextlib.suppress(AttributeError):  # never set
                attributes[slot] = slot.__get__(obj)
        return attributes

    def _items(self, obj: Any) -> Iterable[Any]:
        if self.base in _WITH_ITEMS:
            return self.base.values(obj) if self.is_dict else self.base.__iter__(obj)  # type: ignore[no-any-return]
        return ()

    def _with_items(self, obj: Any, items: list[Any]) -> Any:
        """Return a new object of the original's class with other items, without attributes."""
        base, cls = self.base, type(obj)
        try:
            new = base.__new__(cls, items) if base in (tuple, frozenset) else base.__new__(cls)
        except TypeError as error:  # it has state that base does not know
            message = f"{cls.__qualname__} needs register_container with two functions: {error}"
            raise TypeError(message) from error
        if self.is_dict:
            for key, value in zip(base.keys(obj), items, strict=True):
                base.__setitem__(new, key, value)
        elif base is deque:
            deque.__init__(new, items, obj.maxlen)
        elif base in (list, set):
            base.__init__(new, items)
        return new


TENSOR = Kind(torch.Tensor)


class _Kinds(dict[type, Kind | None]):
    """How to walk objects of exactly one class, ``None`` for objects that are no containers."""

    def __missing__(self, cls: type) -> Kind | None:
        if len(self) >= 1000:  # classes may be short-lived
            self.clear()
        kind = self[cls] = _find_kind(cls)
        return kind


KINDS = _Kinds()


def _find_kind(cls: type) -> Kind | None:
    registered = next((base for base in cls.__mro__ if base in REGISTERED), None)
    if registered is not None:
        return Kind(cls, REGISTERED[registered])
    if issubclass(cls, torch.Tensor):
        return TENSOR
    if issubclass(cls, (torch.nn.Module, enum.Enum)):  # shared by identity, never copied
        return None
    # A struct sequence, with hidden fields.
    if issubclass(cls, tuple) and isinstance(getattr(cls, "n_sequence_fields", None), int):
        return Kind(cls, (tuple.__iter__, lambda obj, items: type(obj)(items, obj.__reduce__()[1][1])))
    kind = Kind(cls)
    return kind if kind.base is not object or any(hasattr(cls, mark) for mark in _MARKS) else None


def _with_data(packed: PackedSequence, items: list[Any]) -> PackedSequence:
    # The lengths stay on the CPU and the indices follow the data: neither is for fn to compute with.
    (data,) = items
    device = getattr(data, "device", packed.data.device)
    indices = [index if index is None else index.to(device) for index in packed[2:]]
    return tuple.__new__(type(packed), (data, packed.batch_sizes, *indices))


register_container(PackedSequence, lambda packed: [packed.data], _with_data)
