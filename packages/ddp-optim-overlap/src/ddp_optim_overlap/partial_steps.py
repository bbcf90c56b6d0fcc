"""Step some of an optimizer's parameters, with everything else of the optimizer unchanged."""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddp_optim_overlap.optimizer_hooks import step_without_hooks, without_step_hooks

__all__ = [
    "PARAMETER_NAMES",
    "PartialSteps",
    "has_one_per_parameter",
    "is_torchs_own",
    "parameters_of",
    "part_of",
    "stand_in",
    "taken",
]

PARAMETER_NAMES = "param_names"
"""The option in which torch keeps the names of a group's parameters, in their order."""


_MOST_KNOWN_PLACES = 1000


class PartialSteps:
    """Calls the ``step`` of optimizers on some of their parameters.

    A step runs on a stand-in: an object of the optimizer's class that shares its state and its options,
    and whose groups have only those parameters. The optimizer itself is never changed, so schedulers,
    ``state_dict`` and ``load_state_dict`` work as always. Options are read at every step. Hooks from
    ``register_step_post_hook`` do not run, because the step is not over.

    Args:
        optimizers: The optimizers, stepped in this order.
        parallel: For each optimizer, the names of the options that have one value per parameter of a group,
            in their order; they are split along with the parameters.
        around: For each optimizer, a function that returns a context manager for the step of a stand-in.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        parallel: Sequence[Collection[str]] = (),
        around: Sequence[Callable[[torch.optim.Optimizer], AbstractContextManager[object]]] = (),
    ) -> None:
        self._optimizers = optimizers
        self.parallel = [frozenset(names) for names in parallel] or [frozenset({PARAMETER_NAMES})] * len(
            optimizers
        )
        self._around = around or [contextlib.nullcontext] * len(optimizers)
        self._members: list[list[list[int]]] = []
        self.renewals = 0
        """How often parameters were added or moved."""
        self._owners: dict[torch.Tensor, list[tuple[int, int, int]]] = {}
        self._known_places: dict[tuple[int, ...], dict[int, dict[int, list[int]]]] = {}
        self._some_shared = False
        self._states_in_order = [0] * len(optimizers)
        self.refresh()

    def refresh(self) -> None:
        """Look for parameters that were added or moved to other groups since the last call."""
        members = [
            [list(map(id, group["params"])) for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        if members == self._members:
            return
        self._members = members
        self.renewals += 1
        self._owners = {}
        self._known_places = {}
        for place, optimizer in enumerate(self._optimizers):
            for number, group in enumerate(optimizer.param_groups):
                for position, parameter in enumerate(group["params"]):
                    self._owners.setdefault(parameter, []).append((place, number, position))
        self._some_shared = any(len({place for place, *_ in owners}) > 1 for owners in self._owners.values())

    @property
    def parameters(self) -> Collection[torch.Tensor]:
        """All parameters of the optimizers, as a collection with fast lookup."""
        return self._owners.keys()

    def share_parameters(self, one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
        """Whether two of the optimizers have a parameter in common."""
        if not self._some_shared:
            return False
        return not set(parameters_of(one)).isdisjoint(parameters_of(other))

    def begin(self) -> None:
        """Begin a step. Its parts may create new states, in the order of the parts."""
        self.refresh()
        self._states_in_order = [len(optimizer.state) for optimizer in self._optimizers]

    def finish(self) -> None:
        """Put new states into the order of an ordinary step, because ``state_dict`` shows the order."""
        for optimizer, known in zip(self._optimizers, self._states_in_order, strict=True):
            state = optimizer.state
            new = list(state)[known:]
            if new:
                parameters = dict.fromkeys(parameters_of(optimizer))  # a parameter may occur twice
                place = {parameter: number for number, parameter in enumerate(parameters)}
                for parameter in sorted(new, key=lambda key: place.get(key, len(place))):
                    state[parameter] = state.pop(parameter)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that the optimizers have, with their ``.grad``."""
        parts = self._places(parameters)
        for place in sorted(parts):
            optimizer = self._optimizers[place]
            # A step may look up a group by its number, so groups with nothing to step stay, empty.
            keep_empty, cut = not is_torchs_own(optimizer), self.parallel[place]
            groups = [
                part_of(group, positions, cut)
                if (positions := parts[place].get(number))
                else empty(group, cut)
                for number, group in enumerate(optimizer.param_groups)
                if keep_empty or number in parts[place]
            ]
            other = stand_in(optimizer, groups)
            with self._around[place](other):
                step_without_hooks(other)

    def _places(self, parameters: Sequence[torch.Tensor]) -> dict[int, dict[int, list[int]]]:
        """Return the positions of parameters by optimizer and group; cached for repeated parameters."""
        key = tuple(map(id, parameters))
        places = self._known_places.get(key)
        if places is None:
            if len(self._known_places) >= _MOST_KNOWN_PLACES:
                self._known_places.clear()
            places = self._known_places[key] = defaultdict(lambda: defaultdict(list))
            for parameter in parameters:
                for place, number, position in self._owners.get(parameter, ()):
                    places[place][number].append(position)
        return places


def part_of(group: dict[str, Any], positions: Sequence[int], parallel: Collection[str]) -> dict[str, Any]:
    """Return a group with only some of its parameters and their values of the ``parallel`` options."""
    parameters = group["params"]
    part = {**group, "params": [parameters[position] for position in positions]}
    for name in parallel:
        if name in group and has_one_per_parameter(group, name):
            part[name] = taken(group[name], positions)
    return part


def empty(group: dict[str, Any], parallel: AbstractSet[str]) -> dict[str, Any]:
    """Return a group without its parameters; faster than a part, since there may be hundreds of groups."""
    return part_of(group, (), parallel) if not parallel.isdisjoint(group) else {**group, "params": []}


def has_one_per_parameter(group: dict[str, Any], name: str) -> bool:
    """Whether an option of a group has as many values as the group has parameters."""
    value = group[name]
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and len(value) == len(group["params"])
    listed = isinstance(value, (list, tuple, deque)) or hasattr(value, "tolist")  # NumPy arrays
    return bool(listed) and len(value) == len(group["params"])


def taken(values: Any, positions: Sequence[int]) -> Any:
    """Return the values at some positions, in a sequence of the same type."""
    if not isinstance(values, (list, tuple, deque)):
        return values[list(positions)]
    chosen = [values[position] for position in positions]
    return type(values)(chosen) if type(values) in (list, tuple, deque) else chosen


def is_torchs_own(optimizer: object) -> bool:
    """Whether the class is one of torch's, whose later steps do nothing that the trial has not shown."""
    return type(optimizer).__module__.startswith(("torch.optim.", "torch.distributed.optim.functional_"))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an object of the optimizer's class with its attributes, these groups and no step hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__ = without_step_hooks(optimizer.__dict__)
    # A scheduler replaces ``step`` on the instance by a function that steps that instance.
    other.__dict__.pop("step", None)
    other.param_groups = groups
    return other
