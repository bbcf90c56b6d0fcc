"""Snapshots of an optimizer's options and attributes, to notice changes."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ddp_optim_overlap.equality import attributes_of, position_of
from ddp_optim_overlap.optimizer_hooks import FUSED_CHECK
from ddp_optim_overlap.trial import own_attributes, shared_state
from dist_utils.torch_compat import tensor_version

__all__ = ["Contents", "changes", "class_attributes_kept", "content_of", "contents_of"]

Contents = dict[tuple[str, Any, int], tuple[int, Any]]
"""The identity and content of each value, by kind, name and group."""

_DEPTH = 4
"""How deep containers and objects in options and attributes are inspected."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def contents_of(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Contents:
    """Return the contents of options, attributes and shared state, and add their tensors to a list."""
    found: Contents = {
        ("option", key, number): _marked(value, tensors)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key != "params"
    }
    for key, value in own_attributes(optimizer).items():
        if key != FUSED_CHECK:
            found["attribute", key, 0] = _marked(value, tensors)
    for owner, value in shared_state(optimizer).items():
        found["state", owner, 0] = _marked(value, tensors)
    return found


def changes(before: Contents, after: Contents) -> dict[tuple[str, Any], bool]:
    """Return the changed values, by kind and name, and whether each is a different object than before."""
    changed = {}
    for place in {**before, **after}:
        one, other = before.get(place), after.get(place)
        if one is None or other is None or one[1] != other[1]:
            kept = one is not None and other is not None and one[0] == other[0]
            changed[place[:2]] = not kept
    return changed


def content_of(value: Any, tensors: list[torch.Tensor], depth: int = _DEPTH) -> Any:
    """Return a key that stays equal while a value's content does, and add its tensors to a list."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return id(value), -1 if value.requires_grad else tensor_version(value)  # steps write parameters
    if not depth or isinstance(value, (torch.nn.Module, type)):
        return id(value)
    if isinstance(value, Mapping):
        return id(value), tuple(map(id, value)), _contents(value.values(), tensors, depth)
    if isinstance(value, (list, tuple, deque)):
        return id(value), _contents(value, tensors, depth)
    if isinstance(value, (set, frozenset)):
        return id(value), frozenset(map(id, value))
    if (position := position_of(value)) is not None:
        return id(value), position
    if not _is_code(value) and (attributes := attributes_of(value)):
        return id(value), _contents(attributes.values(), tensors, depth)
    return id(value), value.tobytes() if hasattr(value, "tobytes") else None  # NumPy arrays


def _is_code(value: Any) -> bool:
    """Whether a value is a callable without state that a step might change, except caches."""
    home = type(value).__module__.partition(".")[0]
    return callable(value) and home in ("builtins", "functools", "torch", "triton")


@contextlib.contextmanager
def class_attributes_kept(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[], str | None]]:
    """Restore the attributes of an optimizer's class that steps change.

    Yields:
        A function that returns the name of an attribute that has changed since, or ``None``.
    """
    places = [
        (kind, name, value)
        for kind in type(optimizer).__mro__
        if kind.__module__.partition(".")[0] not in ("torch", "builtins")
        for name, value in vars(kind).items()
        if not name.startswith("__") and not hasattr(type(value), "__get__")
    ]
    copies: list[Any] = [
        copy.copy(value) if type(value) in (dict, list, set) else None for *_, value in places
    ]
    contents = [_marked(value, []) for *_, value in places]

    def changed() -> Iterator[tuple[int, type, str, Any]]:
        for number, (kind, name, value) in enumerate(places):
            now = vars(kind).get(name)
            if now is not value or _marked(now, []) != contents[number]:
                yield number, kind, name, value

    try:
        yield lambda: next((name for _, _, name, _ in changed()), None)
    finally:
        for number, kind, name, value in list(changed()):
            if type(value) in (dict, list, set):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(copies[number])
            setattr(kind, name, value)


def _contents(values: Any, tensors: list[torch.Tensor], depth: int) -> tuple[Any, ...]:
    if _PLAIN.issuperset(map(type, values)):
        return tuple(values)
    return tuple(content_of(value, tensors, depth - 1) for value in values)


def _marked(value: Any, tensors: list[torch.Tensor]) -> tuple[int, Any]:
    return id(value), content_of(value, tensors)
