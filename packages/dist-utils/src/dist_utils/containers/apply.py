"""One walk through nested containers that replaces every tensor and keeps everything else."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from operator import is_
from typing import Any, TypeVar, overload

import torch

from dist_utils.containers.hidden_tensors import HiddenTensors
from dist_utils.containers.kinds import LEAF, TENSOR, Kind, kind_of
from dist_utils.containers.traced import traced

__all__ = ["apply_to_tensors"]

Q = TypeVar("Q")
T = TypeVar("T")

_MISSING: Any = object()
_OPEN: Any = object()
"""Stands for the result of a container whose children are being walked."""

_opaque_walk: Any = None
"""The walk, hidden from Dynamo."""


@overload
def apply_to_tensors(
    fn: Callable[[torch.Tensor], Q], container: torch.Tensor, *, strict: bool = ...
) -> Q: ...


@overload
def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: T, *, strict: bool = ...) -> T: ...


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any, *, strict: bool = False) -> Any:
    """Replace every tensor in nested containers with ``fn(tensor)``.

    Walks list, tuple, dict, set, frozenset, deque and every subclass of them (``OrderedDict``,
    ``defaultdict``, ``Counter``, named tuples, Hugging Face's ``ModelOutput``), struct sequences such as
    ``torch.return_types.max``, dataclasses, attrs classes, pydantic models, ``mappingproxy``, ``UserDict``,
    ``UserList``, ``ChainMap``, ``SimpleNamespace``, ``PackedSequence``, ``TensorDict`` and tensorclasses, and
    what :func:`register_container` added, to any depth.

    - Types, subclasses, attributes, a ``defaultdict``'s factory and a ``deque``'s length are kept. No
      constructor, ``__post_init__`` or ``__setattr__`` of your classes runs: a changed object is a shallow
      copy with new contents.
    - Where nothing changed the same object comes back, and what was shared stays shared: ``fn`` is called
      once for a tensor that occurs several times.
    - What a ``cached_property`` has computed is an attribute like any other: ``fn`` is called with its
      tensors, and it is not computed again.
    - Dictionary keys are left alone, and so is any other object: modules, generators, your own classes.
      With ``strict`` it is an error if a key or such an object holds a tensor.
    - While ``torch.compile`` traces, lists, tuples, dictionaries, named tuples and dataclasses that hold only
      what their constructors take are part of the graph. The constructors build them, once for each
      occurrence. Other containers break the graph.
    - For a ``PackedSequence``, ``fn`` gets the data; the indices follow it to its device.

    Args:
        fn: Called with each tensor. It may return anything, including the tensor itself.
        container: What to walk. A lone tensor gives ``fn(tensor)``.
        strict: Refuse objects that hold tensors out of reach. Costs a search of all their attributes.

    Returns:
        An object like ``container``.

    Raises:
        ValueError: A container contains itself (the message has the path), or elements of a set would
            collapse into one.
        TypeError: With ``strict``: an object holds a tensor out of reach; the message has the path.

    Cost:
        About 0.2 us a tensor on plain containers, 1 us on dataclasses, plus ``fn``
        (``benchmarks/bench_containers.py``). No communication.

    Source:
        ``torch.distributed.utils._apply_to_tensors``.

    Example:
        >>> apply_to_tensors(torch.neg, {"x": [torch.ones(2)], "name": "a"})
        {'x': [tensor([-1., -1.])], 'name': 'a'}
    """
    if torch.compiler.is_dynamo_compiling():
        return traced(fn, container, otherwise=functools.partial(_walk_untraced, strict=strict))
    return _walk_untraced(fn, container, strict=strict)


def _walk_untraced(fn: Callable[[torch.Tensor], Any], container: Any, *, strict: bool = False) -> Any:
    # Dynamo may trace the walk too, and gets some containers wrong. It is not imported just to be disabled.
    global _opaque_walk  # noqa: PLW0603 - Dynamo may trace this, so no functools.cache
    if "torch._dynamo" not in sys.modules:
        return _walk(fn, container, strict=strict)
    if _opaque_walk is None:
        _opaque_walk = torch.compiler.disable(_walk)  # type: ignore[no-untyped-call]
    return _opaque_walk(fn, container, strict=strict)


def _walk(  # noqa: C901 - one loop: a call per tensor would double its cost
    fn: Callable[[torch.Tensor], Any], container: Any, *, strict: bool = False
) -> Any:
    # Results by the id of the container or tensor. No id is reused, because the lists in ``walked`` keep
    # every child alive, even children that exist only while we look.
    results: dict[int, Any] = {}
    walked: list[list[Any]] = []
    kinds: dict[type, Kind] = {}
    frames: list[tuple[Any, Kind, list[Any], Any, list[Any]]] = []
    hidden = HiddenTensors() if strict else None

    obj: Any = None
    kind = LEAF
    children: list[Any] = [container]
    rest = iter(children)
    replaced: list[Any] = []
    while True:
        for child in rest:
            cls = type(child)
            child_kind = kinds.get(cls)
            if child_kind is None:
                child_kind = kinds[cls] = kind_of(cls)
            if child_kind is LEAF:
                if hidden is not None and (where := hidden.path_in(child)) is not None:
                    path = _path(frames, kind, obj, replaced)
                    raise _out_of_reach(path, cls, f"{path}{where}")
                replaced.append(child)
                continue
            result = results.get(id(child), _MISSING)
            if result is _MISSING:
                if child_kind is not TENSOR:
                    if hidden is not None and hidden.path_in(child_kind.aside(child)) is not None:
                        path = _path(frames, kind, obj, replaced)
                        raise _out_of_reach(path, cls, "a key or its factory")
                    frames.append((obj, kind, children, rest, replaced))
                    results[id(child)] = _OPEN
                    obj, kind, children = child, child_kind, child_kind.children(child)
                    rest, replaced = iter(children), []
                    break
                result = results[id(child)] = fn(child)
            elif result is _OPEN:
                path = _path(frames, kind, obj, replaced)
                raise ValueError(f"a {cls.__qualname__} contains itself, at {path}")
            replaced.append(result)
        else:
            if not frames:
                return replaced[0]
            walked.append(children)
            result = obj if all(map(is_, children, replaced)) else kind.rebuild(obj, replaced)
            results[id(obj)] = result
            obj, kind, children, rest, replaced = frames.pop()
            replaced.append(result)


def _out_of_reach(path: str, cls: type, where: str) -> TypeError:
    return TypeError(
        f"{path}, a {cls.__qualname__}, holds a tensor out of reach, at {where}: use register_container for "
        "its class, or take the tensor out"
    )


def _path(
    frames: list[tuple[Any, Kind, list[Any], Any, list[Any]]], kind: Kind, obj: Any, replaced: list[Any]
) -> str:
    """Return where the walk is. Each frame has replaced all children before the one it is at."""
    places = [*frames[1:], (obj, kind, None, None, replaced)] if frames else []
    names = [kind.names(obj)[len(replaced)] for obj, kind, _, _, replaced in places]
    if len(names) > 20:
        names[10:-10] = [f" ... {len(names) - 20} more ... "]
    return "container" + "".join(names)
