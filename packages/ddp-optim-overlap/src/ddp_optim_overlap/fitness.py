"""Check, before training, that an optimizer can step a few parameters at a time."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from ddp_optim_overlap.communication import refusing_collectives
from ddp_optim_overlap.compared_runs import ComparedRuns, difference, gradients_for
from ddp_optim_overlap.contents import changes, class_attributes_kept, contents_of
from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.errors import UnsupportedGradientError, UnsupportedOptimizerError
from ddp_optim_overlap.later_steps import refusal_of_later_steps
from ddp_optim_overlap.option_kinds import parameters_to_try
from ddp_optim_overlap.partial_steps import PARAMETER_NAMES, has_one_per_parameter, is_torchs_own
from ddp_optim_overlap.trial import Trial, compiling_refused, longest_side, random_numbers_restored

__all__ = [
    "Findings",
    "require_plain_step",
    "require_sparse_support",
    "require_step_per_parameter",
    "require_unused_loss",
]

_SCALES = tuple(10.0**power for power in (-15, -10, -6, -3, -1, 0, 1, 2, 4, 7, 11, 15))
"""Scales of the gradients in the trial's steps. They grow, or momentum would hide the small ones; some are
above and some below whatever limit an optimizer may have."""
_MOST_UNKNOWN_OPTIONS = 3


@dataclass(frozen=True)
class Findings:
    """What the trial has found about an optimizer that steps per parameter.

    Attributes:
        parallel: The names of options with one value per parameter, which are split along with them.
        written: Kinds and names of values that its steps change in place, identically in any order.
    """

    parallel: frozenset[str]
    written: frozenset[tuple[str, Any]]


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless ``optimizer.step()`` needs no closure, no peer and no other optimizer.

    Raises:
        UnsupportedOptimizerError: It does.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, Joinable):  # for example ZeroRedundancyOptimizer
        raise UnsupportedOptimizerError(
            f"{name} communicates in its step and steps other parameters on each rank"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(f"{name}.step needs a closure, which evaluates the model again")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(f"{name} has differentiable=True: autograd would record its steps")
    inner = next((key for key, value in optimizer.__dict__.items() if _has_optimizer(value)), None)
    if inner is not None:
        raise UnsupportedOptimizerError(
            f"{name} has another optimizer in its attribute {inner!r}, which would step all of its "
            "parameters whenever some are stepped: use the ordinary loop"
        )
    on_instance = optimizer.__dict__.get("step")
    if _is_compiled(on_instance) or _is_compiled(type(optimizer).step):
        raise UnsupportedOptimizerError(
            f"step of this {name} is compiled: what is stepped by buckets is not, and has other bits"
        )
    if on_instance is not None and inspect.unwrap(on_instance) is not inspect.unwrap(type(optimizer).step):
        raise UnsupportedOptimizerError(
            f"step was replaced on this {name}: what replaced it would not run for a part of the parameters"
        )


def require_step_per_parameter(
    optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]
) -> Findings:
    """Raise unless stepping parameters separately gives the same bits as stepping them together.

    The trial uses small values, gradients of many scales, and some parameters of every kind, with the
    optimizer's own options and state; then more parameters, and step counters far ahead. Anything that
    couples parameters (a norm over all of them, a counter of calls, random numbers) shows there.

    Args:
        optimizer: Not changed.
        sparse: Parameters with sparse gradients, which are left out.

    Returns:
        What stepping by buckets must know.

    Raises:
        UnsupportedOptimizerError: Results, states, options or attributes differ, the step fails, or it steps
            anything but the parameters in its groups.

    Cost:
        A few thousand values, whatever the sizes of the parameters; two dozen steps of each of three
        copies.
    """
    found = Findings(frozenset(), frozenset())
    for chosen in parameters_to_try(optimizer, sparse):
        found = _found(optimizer, chosen, found, sparse)
    return Findings(found.parallel | {PARAMETER_NAMES}, found.written)


def _found(
    optimizer: torch.optim.Optimizer,
    chosen: Sequence[tuple[int, int]],
    before: Findings,
    sparse: Collection[torch.Tensor],
) -> Findings:
    """Try some parameters, after other trials; return the findings of all."""
    reasons: dict[str, Exception | None] = {}
    for trial in _trials(optimizer, chosen):
        if not before.parallel <= set(trial.parallel):
            continue
        try:
            found = _tried(trial, sparse)
        except UnsupportedOptimizerError:
            raise
        except Exception as error:  # noqa: BLE001 - a step may raise anything
            reasons[_failed_step(optimizer, error)] = error
            continue
        if isinstance(found, Findings):
            return Findings(found.parallel, found.written | before.written)
        reasons[found] = None
    # A step may fail because of how the trial split an option or a state; a difference cannot come from that.
    reason, cause = min(reasons.items(), key=lambda found: found[1] is not None)
    raise UnsupportedOptimizerError(reason) from cause


def _trials(optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, int]]) -> Iterator[Trial]:
    """Yield the possible trials: options split with the parameters or not, with shortened states or none."""
    groups = optimizer.param_groups
    unknown = sorted(
        {
            name
            for group in groups
            for name in group
            if name not in ("params", PARAMETER_NAMES)
            and len(group["params"]) > 1
            and has_one_per_parameter(group, name)
        }
    )
    if len(unknown) > _MOST_UNKNOWN_OPTIONS:
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} has {len(unknown)} options with as many values as parameters "
            f"({', '.join(unknown)}): it is unknown which of them belong to the parameters. Use "
            "OverlapMode.AFTER_REDUCE"
        )
    parameters = [groups[number]["params"][position] for number, position in chosen]
    longest = longest_side(parameters)
    shortened = any(side > longest for parameter in parameters for side in parameter.shape)
    stateful = [bool(optimizer.state.get(parameter)) for parameter in parameters]
    # Some of torch's own steps refuse parameters with and without state together, also in an ordinary loop.
    mixed = is_torchs_own(optimizer) and not all(stateful)
    has_state = (shortened or mixed) and any(stateful)
    for count in range(len(unknown), -1, -1):
        for parallel in itertools.combinations(unknown, count):
            for with_state in (True, False) if has_state else (True,):
                yield Trial(
                    optimizer, chosen, {PARAMETER_NAMES, *parallel}, longest=longest, with_state=with_state
                )


def _tried(trial: Trial, sparse: Collection[torch.Tensor]) -> Findings | str:
    """Return the findings, or why the optimizer cannot be stepped by buckets."""
    name = type(trial.optimizer).__name__
    with (
        class_attributes_kept(trial.optimizer) as class_attributes_changed,
        trial.entered(),
        compiling_refused(),
        refusing_collectives(name),
    ):
        runs = ComparedRuns(trial)
        together = runs.together
        before = {parameter: value.clone() for parameter, value in together.values.items()}
        contents = contents_of(together.optimizer, [])
        for step, scale in enumerate(_SCALES[::4] if is_torchs_own(trial.optimizer) else _SCALES):
            if reason := runs.step(scale, seed=step):
                return reason
        if not any(together.optimizer.state.values()) and equal(before, together.values):
            return f"the step of {name} does not move the parameters in its groups: use the ordinary loop"
        written = changes(contents, contents_of(together.optimizer, []))
        if changed := class_attributes_changed():
            return (
                f"the step of {name} changes {changed!r}, an attribute of its class, which it would do once "
                "for every bucket. Use OverlapMode.AFTER_REDUCE, which steps all at once"
            )
    return refusal_of_later_steps(trial, sparse) or Findings(frozenset(trial.parallel), frozenset(written))


def require_unused_loss(optimizer: torch.optim.Optimizer, parallel: Collection[str]) -> None:
    """Raise if ``step(closure)`` differs from ``step()``, for example if the loss scales the step.

    Args:
        optimizer: An optimizer that steps per parameter. Not changed.
        parallel: Its options with one value per parameter.

    Raises:
        UnsupportedOptimizerError: It differs, or calls the closure more than once.
    """
    name = type(optimizer).__name__
    refused = (
        f"the step of {name} depends on the closure, and buckets are stepped without it: call backward() and "
        "step() without one, or use the ordinary loop"
    )
    chosen = next(iter(parameters_to_try(optimizer, ())), [])
    parameters = [optimizer.param_groups[number]["params"][position] for number, position in chosen]
    trial = Trial(optimizer, chosen, parallel, longest=longest_side(parameters), with_state=False)
    losses = iter([torch.tensor(0.5, device="cpu"), torch.tensor(2.0, device="cpu")])
    try:
        with trial.entered(), compiling_refused():
            without, with_loss = trial.run(), trial.run()
            for step, closure in enumerate([partial(next, losses)] * 2):
                gradients = gradients_for(without.values.values(), 1.0, seed=step)
                with random_numbers_restored(trial.chosen, seed=step):
                    without.step(gradients)
                with random_numbers_restored(trial.chosen, seed=step):
                    with_loss.step(gradients, closure)
            same = not difference(without, with_loss)
    except Exception as error:
        raise UnsupportedOptimizerError(f"{refused} ({type(error).__name__}: {error})") from error
    if not same or next(losses, None) is not None:
        raise UnsupportedOptimizerError(refused)


def _failed_step(optimizer: torch.optim.Optimizer, error: Exception) -> str:
    if "fail_on_recompile" in str(error):
        return (
            f"the step of {type(optimizer).__name__} calls a compiled function ({error}): compiled for "
            "parameters in another order it may have other bits. Use OverlapMode.AFTER_REDUCE"
        )
    return (
        f"the step of {type(optimizer).__name__} failed on small copies of parameters: "
        f"{type(error).__name__}: {error}"
    )


def require_sparse_support(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> None:
    """Raise unless the optimizer can step a parameter whose gradient is sparse.

    Args:
        optimizer: Not changed.
        parameter: One of its own. A copy is stepped with small values.
        name: The parameter's name in the message.

    Raises:
        UnsupportedGradientError: It cannot.
    """
    place = next(
        (number, position)
        for number, group in enumerate(optimizer.param_groups)
        for position, other in enumerate(group["params"])
        if parameter is other
    )
    trial = Trial(optimizer, [place], {PARAMETER_NAMES}, longest=longest_side([parameter]))
    try:
        with trial.entered():
            run = trial.run()
            run.step([torch.ones_like(value).to_sparse(1) for value in run.values.values()])
    except Exception as error:
        raise UnsupportedGradientError(
            f"{type(optimizer).__name__} cannot step {name}, whose gradient is sparse: {error}. "
            "Use SGD, Adagrad or SparseAdam for it, or an embedding with sparse=False"
        ) from error


def _is_compiled(step: Any) -> bool:
    while step is not None:
        # torch uses the same mark for functions that must not be compiled, such as some steps of its own.
        if hasattr(step, "_torchdynamo_orig_callable") and not getattr(step, "_torchdynamo_disable", False):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _has_optimizer(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_optimizer, value))
    return isinstance(value, torch.optim.Optimizer)
