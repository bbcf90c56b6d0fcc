"""One memoized walk through nested containers that replaces every tensor and keeps everything else."""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable
from operator import is_
from typing import Any, TypeVar, overload

import torch

from dist_utils.containers.kinds import KINDS, REGISTERED, TENSOR, Kind

Q = TypeVar("Q")
T = TypeVar("T")

ATTRIBUTES_ARE_TRACED: bool = torch.__version__ >= "2.13"
"""Whether ``torch.compile`` can trace code that lists the attributes of an object; no name shows it."""

_opaque_walk: Any = None
"""The walk, hidden from Dynamo."""


@overload
def apply_to_tensors(fn: Callable[[torch.Tensor], Q], container: torch.Tensor) -> Q: ...


@overload
def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: T) -> T: ...


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """Replace every tensor in nested containers with ``fn(tensor)``.

    Walks list, tuple, dict, set, frozenset, deque and every subclass of them (``OrderedDict``,
    ``defaultdict``, ``Counter``, named tuples, Hugging Face's ``ModelOutput``), struct sequences such as
    ``torch.return_types.max``, dataclasses, attrs classes, pydantic models, ``UserDict``, ``UserList``,
    ``ChainMap``, ``SimpleNamespace``, ``PackedSequence``, and what :func:`register_container` added (it shows
    how to add ``TensorDict``).

    - Types, subclasses, attributes, a ``defaultdict``'s factory and a ``deque``'s length are kept. No
      constructor, ``__post_init__`` or ``__setattr__`` of your classes runs: a changed object is a shallow
      copy with new contents.
    - Where nothing changed the same object comes back, and what was shared stays shared: ``fn`` is called
      once for a tensor that occurs several times.
    - What a ``cached_property`` has computed is an attribute like any other: ``fn`` is called with its
      tensors, and it is not computed again.
    - Dictionary keys are left alone, and so is any other object: modules, generators, your own classes.
    - While ``torch.compile`` traces, lists, tuples, dictionaries, named tuples and dataclasses that hold only
      what their constructors take are part of the graph. The constructors build them, once for each
      occurrence; before torch 2.13, attributes that are no fields are lost. Other containers break the
      graph.
    - For a ``PackedSequence``, ``fn`` gets the data; the indices follow it to its device.

    Args:
        fn: Called with each tensor. It may return anything, including the tensor itself. In a set, equal
            results become one.
        container: What to walk. A lone tensor gives ``fn(tensor)``.

    Returns:
        An object like ``container``.

    Raises:
        ValueError: A container contains itself.
        TypeError: A container that changes has state that only its constructor can make.
        RecursionError: Containers are nested deeper than Python's stack allows; 300 levels are safe.

    Cost:
        About 0.3 us a tensor on plain containers, 1 us on dataclasses, plus ``fn``
        (``benchmarks/bench_containers.py``). No communication.

    Source:
        ``torch.distributed.utils._apply_to_tensors``.

    Example:
        >>> apply_to_tensors(torch.neg, {"x": [torch.ones(2)], "name": "a"})
        {'x': [tensor([-1., -1.])], 'name': 'a'}
    """
    if torch.compiler.is_dynamo_compiling():
        return _trace(fn, container)
    return _walk_untraced(fn, container)


class _Walk:
    """One walk: what has replaced what so far, and where the walk is."""

    def __init__(self, fn: Callable[[torch.Tensor], Any]) -> None:
        self.fn = fn
        # What replaces an object, by its id. No id is reused, because the lists in ``walked`` keep all
        # children alive, even those that exist only while we look.
        self.results: dict[int, Any] = {}
        self.walked: list[list[Any]] = []
        self.open: set[int] = set()
        """The containers between the first one and where the walk is, by id."""

    def visit(self, obj: Any) -> Any:
        """Return what replaces an object."""
        key = id(obj)
        if key in self.results:
            return self.results[key]
        kind = KINDS[type(obj)]
        if kind is None:
            return obj
        result = self.results[key] = self.fn(obj) if kind is TENSOR else self.descend(obj, kind)
        return result

    def descend(self, obj: Any, kind: Kind) -> Any:
        """Return a container with new contents, or the same one if nothing in it changed."""
        if id(obj) in self.open:
            raise ValueError(f"a {type(obj).__qualname__} contains itself")
        children, replaced = kind.children(obj), []
        self.walked.append(children)
        self.open.add(id(obj))
        for child in children:
            replaced.append(self.visit(child))  # noqa: PERF401 - before Python 3.12 that is one frame more
        self.open.remove(id(obj))
        return obj if all(map(is_, children, replaced)) else kind.rebuild(obj, replaced)


def _walk(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    return _Walk(fn).visit(container)


def _walk_untraced(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    # Dynamo may trace the walk too, and gets some containers wrong. It is not imported just to be disabled.
    global _opaque_walk  # noqa: PLW0603 - Dynamo may trace this, so no functools.cache
    if _opaque_walk is None and "torch._dynamo" in sys.modules:
        _opaque_walk = torch.compiler.disable(_walk)  # type: ignore[no-untyped-call]
    return (_opaque_walk or _walk)(fn, container)


def _trace(fn: Callable[[torch.Tensor], Any], obj: Any) -> Any:
    """Walk plain containers in a form that ``torch.compile`` can trace, and leave others to the walk."""
    if isinstance(obj, torch.Tensor):
        return fn(obj)
    if type(obj) in (list, tuple):
        return type(obj)([_trace(fn, value) for value in obj])
    if type(obj) in (dict, OrderedDict):
        return type(obj)([(key, _trace(fn, value)) for key, value in obj.items()])
    if isinstance(obj, (type(None), bool, int, float, complex, str, torch.dtype, torch.device)):
        return obj
    if isinstance(obj, tuple(REGISTERED)):
        return _walk_untraced(fn, obj)
    if isinstance(obj, tuple) and hasattr(obj, "_fields"):
        return type(obj)(*[_trace(fn, value) for value in obj])
    if _is_made_of_its_arguments(obj):
        names = [field.name for field in dataclasses.fields(obj)]
        return type(obj)(**{name: _trace(fn, getattr(obj, name)) for name in names})
    return _walk_untraced(fn, obj)


def _is_made_of_its_arguments(obj: Any) -> bool:
    """Return whether ``obj`` is a dataclass whose constructor takes everything that it holds."""
    # is_dataclass cannot be traced with torch 2.6.
    if not hasattr(obj, "__dataclass_fields__") or isinstance(obj, (list, tuple, set, frozenset)):
        return False
    names = [field.name for field in dataclasses.fields(obj) if field.init]
    held = list(obj) if isinstance(obj, dict) else []  # in transformers' ModelOutput they are its fields
    if ATTRIBUTES_ARE_TRACED:
        held += getattr(obj, "__dict__", ())
    return len(names) == len(dataclasses.fields(obj)) and all(key in names for key in held)
