"""What is in an optimizer's options and attributes, so that a change shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from ddp_optim_overlap.trial import own_attributes, shared_state
from dist_utils.torch_compat import FUSED_CHECK, tensor_version

__all__ = ["Contents", "changes", "content_of", "contents_of"]

Contents = dict[tuple[str, Any, int], tuple[int, Any]]
"""By kind, name and group: which object a value is, and its content."""

_DEPTH = 4
"""Of containers and objects in options and attributes."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def contents_of(optimizer: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> Contents:
    """Return what is in options, attributes and the state of no parameter, and add its tensors to a list."""
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
    """Return what has changed, by kind and name, and whether it is another object than before."""
    changed = {}
    for place in {**before, **after}:
        one, other = before.get(place), after.get(place)
        if one is None or other is None or one[1] != other[1]:
            kept = one is not None and other is not None and one[0] == other[0]
            changed[place[:2]] = not kept
    return changed


def content_of(value: Any, tensors: list[torch.Tensor], depth: int = _DEPTH) -> Any:
    """Return what compares equal as long as a value has the same content, and add its tensors to a list."""
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
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not callable(value):
        return id(value), _contents(attributes.values(), tensors, depth)
    return id(value), value.tobytes() if hasattr(value, "tobytes") else None  # NumPy's


def _contents(values: Any, tensors: list[torch.Tensor], depth: int) -> tuple[Any, ...]:
    if _PLAIN.issuperset(map(type, values)):
        return tuple(values)
    return tuple(content_of(value, tensors, depth - 1) for value in values)


def _marked(value: Any, tensors: list[torch.Tensor]) -> tuple[int, Any]:
    return id(value), content_of(value, tensors)
