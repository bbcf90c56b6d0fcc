"""A short trial of whether an optimizer steps per parameter, on copies of it with small parameters."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.optimizers.equality import same_value
from ddp_optim_overlap.optimizers.partial_steps import (
    NOT_OF_THE_STEP,
    PartialSteps,
    parameters_of,
    part_of,
    stand_in,
    step_without_hooks,
)
from dist_utils.process_groups import error_text

_SCALES = (1e-6, 1e-3, 1.0, 1e3)
"""Of the gradients of one step after another. They grow, or momentum would hide the small ones."""
_OTHER_SCALE = 1e-5
"""Scale of every other gradient in a step, so that a limit between two scales is between two gradients."""
_LEAST_RATE = 0.01
"""A warm-up may begin with a learning rate at which no step has a visible effect."""
_MOST_KINDS = 16
"""How many kinds of parameters are tried at most; two of each."""
_MOST_VALUES = 1024
"""The sides of parameters with more values are cut."""
_LONGEST_SIDE = 8
_NO_ATTRIBUTES = NOT_OF_THE_STEP | {"state"}

_Places = list[tuple[int, int]]
"""Parameters, each by the number of its group and its position there."""


def refusal(reason: str) -> UnsupportedOptimizerError:
    """Return the error for an optimizer that cannot be overlapped, with the remedy."""
    return UnsupportedOptimizerError(f"{reason}: use the ordinary loop with the same communication hook")


def require_passed_trial(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> None:
    """Raise unless stepping parameters one by one gives the same bits as stepping them together.

    Args:
        optimizer: Not changed, nor are its parameters, their gradients and its state. A step that draws
            random numbers is refused, and has drawn some.
        sparse: Parameters with sparse gradients.

    Raises:
        UnsupportedOptimizerError: Values, states or options differ, as they also do if a step draws random
            numbers or keeps a gradient; it sets attributes, fails or moves nothing; or the optimizer cannot
            be copied.

    Cost:
        Four steps of two copies with some small parameters of each group: some tenths of a second.
    """
    places = _places_to_try(optimizer, sparse)
    if not places:
        return
    try:
        # As inside backward(); the caller's default device is no matter.
        with torch.no_grad(), torch.device("cpu"):
            reason = _find_coupling(optimizer, places, sparse)
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        text = f"failed on small copies of parameters, with {error_text(error)}"
        raise refusal(f"the trial of {type(optimizer).__name__} {text}") from error
    if reason:
        raise refusal(f"{type(optimizer).__name__} {reason}")


def _find_coupling(
    optimizer: torch.optim.Optimizer, places: _Places, sparse: Collection[torch.Tensor]
) -> str:
    """Say what differs if copies are stepped together or one by one; an empty string if nothing does."""
    fresh, together, one_by_one = (_small_copy(optimizer, places) for _ in range(3))
    for seed, scale in enumerate(_SCALES):
        gradients = _gradients(fresh, scale, seed)
        for place, (number, at) in enumerate(places):
            if optimizer.param_groups[number]["params"][at] in sparse:
                gradients[place] = gradients[place].to_sparse(1)
        _step_together(together, gradients)
        _step_one_by_one(one_by_one, gradients)
        if found := _difference(together, one_by_one):
            return f"does not step per parameter: {found} differs if parameters are stepped one by one"
    return "" if _difference(together, fresh) else "does not move the parameters in its groups"


def _step_together(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters_of(optimizer), gradients, strict=True):
        parameter.grad = gradient.clone()
    step_without_hooks(optimizer)


def _step_one_by_one(optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    """Step one parameter after another, the last one first, as DDP's buckets come.

    As in a backward pass, other gradients are then missing or not averaged yet, and memory is used again.
    """
    parts = PartialSteps(optimizer)
    parameters = parameters_of(optimizer)
    for place, parameter in enumerate(parameters):
        parameter.grad = torch.ones_like(parameter) if place % 2 else None
    for parameter, gradient in reversed(list(zip(parameters, gradients, strict=True))):
        before, parameter.grad = parameter.grad, gradient.clone()
        averaged = parameter.grad
        parts.step([parameter])
        parameter.grad = before
        averaged.zero_()
    parts.finish()


def _difference(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> str:
    """Describe the first difference between two copies; what may cause the rest is first."""
    mine, theirs = _contents(one), _contents(other)
    return next((what for what, value in mine.items() if not same_value(value, theirs[what])), "")


def _contents(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a step may change, with descriptions."""
    groups, state = optimizer.param_groups, dict[Any, Any](optimizer.state)
    options = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    return {
        "an option": options,
        "state of no parameter": [state[one] for one in state if not isinstance(one, torch.Tensor)],
        "a parameter or its state": [(one.detach(), state.get(one, {})) for one in parameters_of(optimizer)],
    }


def _small_copy(optimizer: torch.optim.Optimizer, places: _Places) -> torch.optim.Optimizer:
    """Return a copy of an optimizer with small copies of the parameters at these places."""
    groups = [
        part_of(group, [at for other, at in places if other == number])
        for number, group in enumerate(optimizer.param_groups)
    ]
    originals = [one for group in groups for one in group["params"]]
    small = {one: _small(one) for one in originals}
    known: dict[Any, Any] = optimizer.state
    state = {
        owner: _cut_state(value, owner) if owner in small else value
        for owner, value in known.items()
        if owner in small or not isinstance(owner, torch.Tensor)
    }
    others = {one: one.detach()[(slice(1),) * one.dim()].clone() for one in parameters_of(optimizer)}
    memo: dict[int, Any] = {id(one): instead for one, instead in {**others, **small}.items()}
    memo[id(optimizer)] = copied = stand_in(optimizer, [])
    attributes = {name: one for name, one in vars(optimizer).items() if name not in _NO_ATTRIBUTES}
    wanted = groups, state, attributes, [vars(one) for one in originals]
    groups, state, attributes, of_parameters = copy.deepcopy(wanted, memo)
    for group in groups:
        if isinstance(group.get("lr"), (int, float, torch.Tensor)):
            group["lr"] = max(group["lr"], 0 * group["lr"] + _LEAST_RATE)
    vars(copied).update(attributes, param_groups=groups, state=defaultdict(dict, state))
    for one, own in zip(originals, of_parameters, strict=True):
        vars(small[one]).update(own)
    return copied


def _cut_state(state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """Return the state of a parameter, cut like it; none, as before a first step, if that cannot be cut."""
    if parameter.numel() <= _MOST_VALUES:
        return state
    cut = {}
    for name, value in state.items():
        is_dense = isinstance(value, torch.Tensor) and value.layout is torch.strided
        alike = is_dense and value.shape in ((), parameter.shape)
        if not alike and not isinstance(value, (int, float)):
            return {}
        cut[name] = _cut(value, parameter) if alike else value
    return cut


def _places_to_try(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> _Places:
    """Return the smallest and the largest parameter of each kind, as far as it may matter for a step."""
    kinds: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    seen: set[torch.Tensor] = set()  # a parameter may occur twice
    for number, group in enumerate(optimizer.param_groups):
        for at, one in enumerate(group["params"]):
            if one.requires_grad and one.numel() and one not in seen:
                seen.add(one)
                kind = number, one.dim(), one.dtype, one.device, one in sparse
                kinds[kind].append((one.numel(), at))
    chosen = list(kinds)[:: math.ceil(len(kinds) / _MOST_KINDS) or 1]
    return sorted({(kind[0], at) for kind in chosen for _, at in (min(kinds[kind]), max(kinds[kind]))})


def _small(parameter: torch.Tensor) -> torch.Tensor:
    """Return a small copy of a parameter; every other value is zero, where the smallest step is visible."""
    values = _cut(parameter, parameter)
    odd = torch.arange(values.numel(), device=values.device) % 2 == 1
    return torch.nn.Parameter(values.masked_fill_(odd.view(values.shape), 0), parameter.requires_grad)


def _cut(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter, or of a tensor of its state, that is small if the parameter is not."""
    if parameter.numel() > _MOST_VALUES:
        tensor = tensor[(slice(_LONGEST_SIDE),) * tensor.dim()]
    return tensor.detach().clone()


def _gradients(optimizer: torch.optim.Optimizer, scale: float, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for place, one in enumerate(parameters_of(optimizer)):
        dtype = torch.complex64 if one.is_complex() else torch.float32
        gradient = torch.randn(one.shape, generator=generator, dtype=dtype, device="cpu") * scale
        gradient *= _OTHER_SCALE if (place + seed) % 2 else 1.0
        # With the parameter's strides, because the order of a sum depends on them.
        found.append(torch.empty_like(one).copy_(gradient))
    return found
