"""The options that a trial depends on, and the parameters that are equivalent for it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Hashable, Mapping
from typing import Any

import torch

from ddp_optim_overlap.partial_steps import has_one_per_parameter
from ddp_optim_overlap.trial import own_attributes

__all__ = ["kind_of", "parameters_to_try"]

_DISTINCT_GROUPS = 16
"""Up to this many groups are each tried; further groups only if their options differ."""


def kind_of(optimizer: torch.optim.Optimizer) -> Hashable:
    """Return a key that changes whenever a trial has to be repeated.

    It has the groups, the kinds of their options (such as whether one is zero), and container attributes.
    """
    groups = tuple((len(group["params"]), _kind(group)) for group in optimizer.param_groups)
    return groups, frozenset(
        (name, type(value).__qualname__)
        for name, value in own_attributes(optimizer).items()
        if isinstance(value, (Mapping, list, set, deque))
    )


def parameters_to_try(
    optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]
) -> list[list[tuple[int, int]]]:
    """Return the groups and positions of the smallest and the largest parameter of every kind.

    Parameters are of one kind if they are in one group (or, if there are many groups, in groups with the same
    options) and have the same number of dimensions, dtype and device. Parameters without values or without a
    gradient are left out.

    Returns:
        A list of parameters without state, and a list of parameters with state, because an ordinary step may
        not take both together. Empty lists are left out.
    """
    left_out = {id(parameter) for parameter in sparse}
    kinds: dict[tuple[bool, Hashable, int, torch.dtype, torch.device], list[tuple[int, int, int]]] = {}
    for number, group in enumerate(optimizer.param_groups):
        options = number if number < _DISTINCT_GROUPS else _kind(group)
        for position, parameter in enumerate(group["params"]):
            if not parameter.requires_grad or not parameter.numel() or id(parameter) in left_out:
                continue
            has_state = bool(optimizer.state.get(parameter))
            kind = (has_state, options, parameter.dim(), parameter.dtype, parameter.device)
            kinds.setdefault(kind, []).append((parameter.numel(), number, position))
    chosen: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for (has_state, *_), alike in kinds.items():
        # Two of the same group, if possible, because a norm over a group couples only its own parameters.
        largest, _ = Counter(number for _, number, _ in alike).most_common(1)[0]
        together = [place for place in alike if place[1] == largest]
        pair = together if len(together) > 1 else alike
        chosen[has_state] |= {min(pair)[1:], max(pair)[1:]}
    return [sorted(places) for places in chosen.values() if places]


def _kind(group: dict[str, Any]) -> Hashable:
    return tuple(
        (
            name,
            _kind_of_value(value),
            name != "params" and has_one_per_parameter(group, name),
        )
        for name, value in group.items()
        if name != "params"
    )


def _kind_of_value(value: Any) -> Hashable:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return type(value), value == 0
    if isinstance(value, tuple):
        return tuple(map(_kind_of_value, value))
    return type(value).__qualname__
