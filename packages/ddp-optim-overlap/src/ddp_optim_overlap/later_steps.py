"""Trials of later steps, of more parameters, and of parameters without a gradient."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ddp_optim_overlap.communication import refusing_collectives
from ddp_optim_overlap.compared_runs import ComparedRuns, gradients_for
from ddp_optim_overlap.contents import class_attributes_kept
from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.partial_steps import is_torchs_own
from ddp_optim_overlap.trial import Run, Trial, compiling_refused, longest_side, random_numbers_restored

__all__ = ["refusal_of_later_steps"]

_MOST_PARAMETERS = 32
_AHEAD = (100, 1_386_000)
"""Step counts to try, together with the counts just before and after. They are multiples of all usual
intervals, and exact in float32."""

Counter = tuple[torch.Tensor, str]


def refusal_of_later_steps(trial: Trial, sparse: Collection[torch.Tensor]) -> str:
    """Return why an optimizer that passed a trial still cannot be stepped by buckets, or ``""``.

    Tries its own learning rate, up to 32 parameters and, if the states of parameters count steps, high step
    counts. An error that only occurs at such counts is ignored, because training has not got that far.

    Args:
        trial: The trial that was passed.
        sparse: Parameters with sparse gradients, which are left out.
    """
    if is_torchs_own(trial.optimizer):
        return ""
    optimizer, name = trial.optimizer, type(trial.optimizer).__name__
    more = _trial_of(trial, _places(optimizer, sparse, trial.places))
    with class_attributes_kept(optimizer), more.entered(), compiling_refused(), refusing_collectives(name):
        if reason := _difference_later(more):
            return reason
    frozen = [place for place, one in _all(optimizer) if not one.requires_grad and one.numel()]
    places = sorted({*trial.places, *frozen[:_MOST_PARAMETERS]})
    if frozen and _moves_without_gradient(_trial_of(trial, places)):
        return (
            f"the step of {name} moves parameters that have no gradient, and some of them are frozen, which "
            "are in no bucket. Use OverlapMode.AFTER_REDUCE, or leave them out of the optimizer"
        )
    return ""


def _trial_of(trial: Trial, places: Sequence[tuple[int, int]]) -> Trial:
    groups = trial.optimizer.param_groups
    longest = longest_side([groups[number]["params"][position] for number, position in places])
    return Trial(trial.optimizer, places, trial.parallel, longest=longest, with_state=trial.with_state)


def _all(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield (number, position), parameter


def _places(
    optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor], chosen: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    left_out = {id(parameter) for parameter in sparse}
    others = [
        place
        for place, one in _all(optimizer)
        if one.requires_grad and one.numel() and id(one) not in left_out and place not in chosen
    ]
    return sorted([*chosen, *others[: max(0, _MOST_PARAMETERS - len(chosen))]])


def _moves_without_gradient(trial: Trial) -> bool:
    with trial.entered():
        run = trial.run()
        frozen = {one: value.clone() for one, value in run.values.items() if not one.requires_grad}
        for seed in range(2):
            gradients = gradients_for(run.values.values(), 1.0, seed)
            with random_numbers_restored(trial.chosen, seed):
                run.step(
                    [
                        gradient if parameter.requires_grad else None
                        for parameter, gradient in zip(run.values, gradients, strict=True)
                    ]
                )
        return any(
            not equal(before, run.values[one]) or bool(run.optimizer.state.get(one))
            for one, before in frozen.items()
        )


def _difference_later(trial: Trial) -> str:
    runs = ComparedRuns(trial, raised=False)
    seed = 0
    before = _counts(runs.together)
    for scale in (1e-3, 1.0):
        if reason := runs.step(scale, seed := seed + 1):
            return reason
        counts = _counts(runs.together)
        counting = [counter for counter, count in counts.items() if count - before.get(counter, count) == 1]
        before = counts
    for count in _AHEAD if counting else ():
        for run in runs.all:
            for counter in counting:
                _set_count(run, counter, count - 2)
        try:
            for scale in (1e-3, 1.0, 1e3):
                if reason := runs.step(scale, seed := seed + 1):
                    return reason
        except UnsupportedOptimizerError:
            raise
        except Exception:  # noqa: BLE001 - the value may not have been a step counter
            return ""
    return ""


def _counts(run: Run) -> dict[Counter, float]:
    return {
        (parameter, name): float(value)
        for parameter in run.values
        for name, value in run.optimizer.state.get(parameter, {}).items()
        if isinstance(value, (int, float))
        or (isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex())
    }


def _set_count(run: Run, counter: Counter, count: int) -> None:
    parameter, name = counter
    value = run.optimizer.state[parameter][name]
    if isinstance(value, torch.Tensor):
        value.fill_(count)
    else:
        run.optimizer.state[parameter][name] = type(value)(count)
