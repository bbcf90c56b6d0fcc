"""Step some of an optimizer's parameters, with everything else of the optimizer unchanged."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.optimizers.equality import same_value
from dist_utils.torch_compat import private

PARAMETER_NAMES = "param_names"
"""The option in which torch keeps the names of a group's parameters, in their order."""

_PURPOSE = "steps without an optimizer's step hooks"

_STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"

_STEP_POST_HOOKS = "_optimizer_step_post_hooks"

NOT_OF_THE_STEP = frozenset(
    {"param_groups", "step", _STEP_PRE_HOOKS, _STEP_POST_HOOKS, "_need_device_dtype_check_for_fused"}
)
"""Attributes in which a stand-in may differ from its optimizer. The last one says whether the next step of
fused SGD and Adagrad checks its parameters' devices, which normally only the first one does."""


class PartialSteps:
    """Calls the ``step`` of an optimizer on some of its parameters.

    A step runs on a stand-in: an object of the optimizer's class that shares its state and its options,
    and whose groups have only those parameters. The optimizer itself is never changed, so schedulers,
    ``state_dict`` and ``load_state_dict`` work as always. Options are read at every step. Hooks from
    ``register_step_post_hook`` do not run, because the step is not over.

    Optimizers that are not reviewed may also set options, as those do that count steps in their groups: every
    part begins with the options that the whole step has begun with, and what parts have set alike is set in
    the optimizer at the end.

    Args:
        optimizer: Whose step it is.
        reviewed: Whether its class is known to step per parameter, and to set no option.

    Attributes:
        parameters: Those of all groups, in order.
        places: For each of them, by ``id``, the number of its group and its position there, usually once. The
            hash of a tensor is computed in Python.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, reviewed: bool = False) -> None:
        self.optimizer, self._reviewed = optimizer, reviewed
        self.parameters: list[torch.Tensor] = []
        self.places: dict[int, list[tuple[int, int]]] = {}
        self._members: list[list[int]] = []
        self._loaded: list[dict[str, Any]] | None = None  # load_state_dict() makes another list
        self.begin()

    def begin(self) -> bool:
        """Begin a step, whose parts may create new states, in the order of the parts.

        Returns:
            Whether parameters were added or moved to other groups, or options loaded, since the last step.
        """
        groups = self.optimizer.param_groups
        self._known_states = len(self.optimizer.state)
        self._groups = groups if self._reviewed else [dict(group) for group in groups]
        self._options_set: dict[int, dict[str, Any]] = {}
        members = [list(map(id, group["params"])) for group in groups]
        if members == self._members and groups is self._loaded:
            return False
        self._members, self._loaded = members, groups
        self.parameters = parameters_of(self.optimizer)
        self.places = {}
        for number, group in enumerate(members):
            for position, parameter_id in enumerate(group):
                self.places.setdefault(parameter_id, []).append((number, position))
        return True

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that the optimizer has, with their ``.grad``.

        Raises:
            UnsupportedOptimizerError: The step has set an attribute, or an option not as another part has.
        """
        positions: dict[int, list[int]] = defaultdict(list)
        for parameter in parameters:
            for number, position in self.places.get(id(parameter), ()):
                positions[number].append(position)
        if not positions:
            return
        # Other optimizers may look up a group by its number, so groups with nothing to step stay, empty.
        groups = [
            part_of(group, positions.get(number, ()))
            for number, group in enumerate(self._groups)
            if number in positions or not self._reviewed
        ]
        part = stand_in(self.optimizer, groups)
        note_writes(parameters_of(part))
        step_without_hooks(part)
        if not self._reviewed:
            _require_no_attribute_set(self.optimizer, part)
            for number, (before, group) in enumerate(zip(self._groups, groups, strict=True)):
                self._keep_options(number, before, group, part)

    def _keep_options(
        self, number: int, before: dict[str, Any], group: dict[str, Any], part: torch.optim.Optimizer
    ) -> None:
        """Keep the options that a part has set; raise if another part has set something else."""
        known = self._options_set.setdefault(number, {})
        for name, value in group.items():
            if name in ("params", PARAMETER_NAMES) or value is before.get(name, group):
                continue
            if not same_value(value, known.setdefault(name, value)):
                raise _not_per_parameter(part, f"option {name!r}")

    def finish(self) -> None:
        """Set the options that parts have set.

        Also put new states into the order of an ordinary step, because ``state_dict`` shows the order.
        """
        for number, values in self._options_set.items():
            self.optimizer.param_groups[number].update(values)
        state = self.optimizer.state
        new = list(state)[self._known_states :]
        if new:
            parameters = dict.fromkeys(parameters_of(self.optimizer))  # a parameter may occur twice
            place = {parameter: number for number, parameter in enumerate(parameters)}
            for parameter in sorted(new, key=lambda key: place.get(key, len(place))):
                state[parameter] = state.pop(parameter)


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
    no_hooks = {_STEP_PRE_HOOKS: OrderedDict[int, Any](), _STEP_POST_HOOKS: OrderedDict[int, Any]()}
    other.__dict__ = {**optimizer.__dict__, **no_hooks, "param_groups": groups}
    # A scheduler replaces ``step`` on the instance by a function that steps that instance.
    other.__dict__.pop("step", None)
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


# What torch keeps about the steps of an optimizer: hooks around them, and marks


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step pre-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    of_all = private("torch.optim.optimizer", "_global_optimizer_pre_hooks", _PURPOSE)
    return {**of_all, **private(optimizer, _STEP_PRE_HOOKS, _PURPOSE)}


def run_guards(optimizer: torch.optim.Optimizer) -> None:
    """Run the step pre-hooks of all optimizers that only raise, as if this one were about to step.

    They are marked by an attribute, ``guards``. No public name for all hooks up to torch 2.15.
    """
    of_all = private("torch.optim.optimizer", "_global_optimizer_pre_hooks", _PURPOSE)
    for hook in list(of_all.values()):
        if hasattr(hook, "guards"):
            hook(optimizer, (optimizer,), {})


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step post-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    of_all = private("torch.optim.optimizer", "_global_optimizer_post_hooks", _PURPOSE)
    return {**of_all, **private(optimizer, _STEP_POST_HOOKS, _PURPOSE)}


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call an optimizer's ``step`` without any hooks, those of all optimizers included.

    torch wraps the ``step`` of a class in the code that calls them. No public name up to torch 2.15.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is _calls_hooks():
        step = step.__wrapped__
    step(optimizer)


@functools.cache
def _calls_hooks() -> CodeType:
    """Return the code that calls the hooks around any ``step``."""

    def step(_: torch.optim.Optimizer) -> None: ...

    return torch.optim.Optimizer.profile_hook_step(step).__code__


def note_writes(parameters: Sequence[torch.Tensor]) -> None:
    """Tell autograd, before a step, which parameters it writes.

    A node that still has to read one of them then raises. Fused steps do not tell it.
    """
    torch.autograd.graph.increment_version([one for one in parameters if one.grad is not None])


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped without a call of ``step()``.

    They warn otherwise. The attribute that they read has no public name up to torch 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
