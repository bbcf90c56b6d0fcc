"""Step some of an optimizer's parameters, with everything else of the optimizer unchanged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.optimizers.equality import same_value
from ddp_optim_overlap.optimizers.step_hooks import NOT_OF_THE_STEP, step_without_hooks, without_step_hooks

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
        reviewed: Whether an optimizer's class is known to step per parameter, and to set no option.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        reviewed: Callable[[torch.optim.Optimizer], bool] = lambda _: False,
    ) -> None:
        self._steps = [_PartialStep(optimizer, reviewed=reviewed(optimizer)) for optimizer in optimizers]
        self._members: list[list[list[int]]] = []
        self.renewals = 0
        """How often parameters were added or moved."""
        self._owners: dict[torch.Tensor, list[tuple[int, int, int]]] = {}
        self._known_places: dict[tuple[int, ...], dict[int, dict[int, list[int]]]] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look for parameters that were added or moved to other groups since the last call."""
        groups = [one.optimizer.param_groups for one in self._steps]
        members = [[list(map(id, group["params"])) for group in each] for each in groups]
        if members == self._members:
            return
        self._members = members
        self.renewals += 1
        self._owners = {}
        self._known_places = {}
        for place, each in enumerate(groups):
            for number, group in enumerate(each):
                for position, parameter in enumerate(group["params"]):
                    self._owners.setdefault(parameter, []).append((place, number, position))

    @property
    def parameters(self) -> Collection[torch.Tensor]:
        """All parameters of the optimizers, as a collection with fast lookup."""
        return self._owners.keys()

    def place_of(self, parameter: torch.Tensor) -> str:
        """Describe where a parameter is."""
        place, number, position = self._owners[parameter][0]
        return f"{position} in group {number} of {type(self._steps[place].optimizer).__name__}"

    def begin(self) -> None:
        """Begin a step. Its parts may create new states, in the order of the parts."""
        self.refresh()
        for one in self._steps:
            one.begin()

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that the optimizers have, with their ``.grad``.

        Raises:
            UnsupportedOptimizerError: A step has set an attribute, or an option not as another part has.
        """
        parts = self._places(parameters)
        for place in sorted(parts):
            self._steps[place].step(parts[place])

    def finish(self) -> list[dict[int, dict[str, Any]]]:
        """Finish a step.

        Returns:
            For each optimizer, the options that its parts have set, by group.
        """
        return [one.finish() for one in self._steps]

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


class _PartialStep:
    """The parts of one optimizer's step.

    Optimizers that are not reviewed may also set options, as those do that count steps in their groups: every
    part begins with the options that the whole step has begun with, and what all parts have set alike is set
    in the optimizer at the end.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, reviewed: bool) -> None:
        self.optimizer, self._reviewed = optimizer, reviewed
        self.begin()

    def begin(self) -> None:
        self._known_states = len(self.optimizer.state)
        groups = self.optimizer.param_groups
        self._groups = groups if self._reviewed else [dict(group) for group in groups]
        self._options_set: dict[int, _OptionsSet] = {}

    def step(self, positions: Mapping[int, Sequence[int]]) -> None:
        """Step the parameters at these positions of each group."""
        # Other optimizers may look up a group by its number, so groups with nothing to step stay, empty.
        groups = [
            part_of(group, positions.get(number, ()))
            for number, group in enumerate(self._groups)
            if number in positions or not self._reviewed
        ]
        part = stand_in(self.optimizer, groups)
        step_without_hooks(part)
        if not self._reviewed:
            _require_no_attribute_set(self.optimizer, part)
            for number, (before, group) in enumerate(zip(self._groups, groups, strict=True)):
                self._keep_options(number, before, group, part)

    def _keep_options(
        self, number: int, before: dict[str, Any], group: dict[str, Any], part: torch.optim.Optimizer
    ) -> None:
        """Keep the options that a part has set; raise if another part has set something else."""
        found = _OptionsSet(
            any(parameter.grad is not None for parameter in group["params"]),
            {
                name: value
                for name, value in group.items()
                if name not in ("params", PARAMETER_NAMES) and value is not before.get(name, group)
            },
        )
        known = self._options_set.get(number)
        if known is None or (found.has_gradients and not known.has_gradients):
            self._options_set[number] = found  # a step may pass over other groups
        elif found.has_gradients and not same_value(found.values, known.values):
            raise _not_per_parameter(part, f"option {', '.join({**found.values, **known.values})!r}")

    def finish(self) -> dict[int, dict[str, Any]]:
        """Set the options that all parts have set, and return them by group.

        Also put new states into the order of an ordinary step, because ``state_dict`` shows the order.
        """
        options = {number: found.values for number, found in self._options_set.items() if found.values}
        for number, values in options.items():
            self.optimizer.param_groups[number].update(values)
        state = self.optimizer.state
        new = list(state)[self._known_states :]
        if new:
            parameters = dict.fromkeys(parameters_of(self.optimizer))  # a parameter may occur twice
            place = {parameter: number for number, parameter in enumerate(parameters)}
            for parameter in sorted(new, key=lambda key: place.get(key, len(place))):
                state[parameter] = state.pop(parameter)
        return options


class _OptionsSet(NamedTuple):
    """The options of a group that a part has set, and whether the part has gradients of the group."""

    has_gradients: bool
    values: dict[str, Any]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part_of(group: dict[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Return a group with only some of its parameters and their names."""
    part = {**group, "params": [group["params"][position] for position in positions]}
    if PARAMETER_NAMES in group:
        part[PARAMETER_NAMES] = [group[PARAMETER_NAMES][position] for position in positions]
    return part


def stand_in(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an object of the optimizer's class with its attributes, these groups and no step hooks."""
    other: torch.optim.Optimizer = object.__new__(type(optimizer))
    other.__dict__ = without_step_hooks(optimizer.__dict__)
    # A scheduler replaces ``step`` on the instance by a function that steps that instance.
    other.__dict__.pop("step", None)
    other.param_groups = groups
    return other


def _require_no_attribute_set(optimizer: torch.optim.Optimizer, part: torch.optim.Optimizer) -> None:
    """Raise if the step of a stand-in has set an attribute: that is lost with the stand-in."""
    own, of_part = vars(optimizer), vars(part)
    for name in {*own, *of_part} - NOT_OF_THE_STEP:
        if name not in own or name not in of_part or own[name] is not of_part[name]:
            raise _not_per_parameter(part, f"attribute {name!r}")


def _not_per_parameter(part: torch.optim.Optimizer, what: str) -> UnsupportedOptimizerError:
    return UnsupportedOptimizerError(
        f"the step of {type(part).__name__} has set its {what}, differently or once for every bucket, so it "
        "does not step per parameter: use the ordinary loop with the same communication hook"
    )
