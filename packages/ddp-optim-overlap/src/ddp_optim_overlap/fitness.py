"""Find out, before training, whether an optimizer can be stepped a few parameters at a time."""

from __future__ import annotations

import copy
import inspect
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from ddp_optim_overlap.errors import UnsupportedGradientError, UnsupportedOptimizerError
from ddp_optim_overlap.partial_steps import PartialSteps, stand_in

__all__ = ["require_plain_step", "require_sparse_support", "require_step_per_parameter"]

_SCALES = (100.0, 1.0, 1e-3)
"""Of the gradients in the trial's steps: some above and some below whatever limit an optimizer may have."""


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless ``optimizer.step()`` needs no closure and no peer.

    Raises:
        UnsupportedOptimizerError: It does.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, Joinable):  # as ZeroRedundancyOptimizer
        raise UnsupportedOptimizerError(
            f"{name} communicates in its step and steps other parameters on each rank"
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedOptimizerError(f"{name}.step needs a closure, which evaluates the model again")
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UnsupportedOptimizerError(f"{name} has differentiable=True: autograd would record its steps")
    on_instance = optimizer.__dict__.get("step")
    if on_instance is not None and inspect.unwrap(on_instance) is not inspect.unwrap(type(optimizer).step):
        raise UnsupportedOptimizerError(
            f"step was replaced on this {name}: what replaced it would not run for a part of the parameters"
        )


def require_step_per_parameter(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> None:
    """Raise unless stepping parameters apart gives the bits of stepping them together.

    Tried on copies of two of the optimizer's smallest parameters, with its own options and state. What
    couples parameters (a norm over all of them, a counter of calls) shows there.

    Args:
        optimizer: Left as it is.
        sparse: Parameters with sparse gradients, which take no part.

    Raises:
        UnsupportedOptimizerError: The results, the states or the options differ, or the step fails.
    """
    name = type(optimizer).__name__
    pair = _smallest_pair(optimizer, sparse)
    if len(pair) < 2:
        return  # nothing to couple
    together, apart = (_trial(optimizer, pair) for _ in range(2))
    devices = [pair[0][1].device] if pair[0][1].device.type == "cuda" else []
    parts = PartialSteps([apart])
    try:
        with torch.random.fork_rng(devices=devices):
            for step, scale in enumerate(_SCALES):
                for run in (together, apart):
                    _set_gradients(run, scale, seed=step)
                    torch.manual_seed(step)  # for optimizers that add noise
                    if run is together:
                        run.step()
                    else:
                        for parameter in _parameters(run):
                            parts.step([parameter])
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"the step of {name} failed on copies of two parameters: {type(error).__name__}: {error}"
        ) from error
    difference = _difference(together, apart)
    if difference:
        raise UnsupportedOptimizerError(
            f"{name} does not step per parameter: {difference} when two parameters are stepped apart. "
            "Use OverlapMode.AFTER_REDUCE, which steps all at once"
        )


def require_sparse_support(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, name: str) -> None:
    """Raise unless the optimizer can step a parameter whose gradient is sparse.

    Args:
        optimizer: Left as it is.
        parameter: One of its own. Two rows of it are copied and stepped.
        name: For the message.

    Raises:
        UnsupportedGradientError: It cannot.
    """
    number = next(
        number
        for number, group in enumerate(optimizer.param_groups)
        if any(parameter is other for other in group["params"])
    )
    run = _trial(optimizer, [(number, parameter)], rows=2)
    (copied,) = _parameters(run)
    copied.grad = torch.ones_like(copied).to_sparse(1)
    try:
        run.step()
    except Exception as error:
        raise UnsupportedGradientError(
            f"{type(optimizer).__name__} cannot step {name}, whose gradient is sparse: {error}. "
            "Use SGD, Adagrad or SparseAdam for it, or an embedding with sparse=False"
        ) from error


def _smallest_pair(
    optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]
) -> list[tuple[int, torch.Tensor]]:
    sparse_ids = {id(parameter) for parameter in sparse}
    candidates = [
        (number, parameter)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad and id(parameter) not in sparse_ids
    ]
    candidates.sort(key=lambda pair: pair[1].numel())
    for number, _ in candidates[:1]:
        same_group = [pair for pair in candidates if pair[0] == number]
        if len(same_group) >= 2:
            return same_group[:2]
    return candidates[:2]


def _trial(
    optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, torch.Tensor]], rows: int | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer as this one, with copies of some parameters and of their state."""
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    groups: dict[int, dict[str, Any]] = {}
    for number, parameter in chosen:
        copied = parameter.detach()[:rows].clone().requires_grad_()
        original = optimizer.param_groups[number]
        group = groups.setdefault(
            number,
            {
                **{key: copy.deepcopy(value) for key, value in original.items() if key != "params"},
                "params": [],
            },
        )
        group["params"].append(copied)
        if parameter in optimizer.state:
            state[copied] = {
                key: value[:rows].clone()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                else copy.deepcopy(value)
                for key, value in optimizer.state[parameter].items()
            }
    run = stand_in(optimizer, list(groups.values()))
    own = {key: value for key, value in run.__dict__.items() if _is_number(value)}
    run.__dict__.update(copy.deepcopy(own))
    run.state = state
    return run


def _parameters(run: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in run.param_groups for parameter in group["params"]]


def _set_gradients(run: torch.optim.Optimizer, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in _parameters(run):
        values = torch.randn(parameter.shape, generator=generator) * scale
        parameter.grad = torch.empty_like(parameter).copy_(values)


def _difference(together: torch.optim.Optimizer, apart: torch.optim.Optimizer) -> str:
    for one, other in zip(_parameters(together), _parameters(apart), strict=True):
        if not _equal(one.detach(), other.detach()):
            return "other values come out"
        if not _equal(dict(together.state[one]), dict(apart.state[other])):
            return "its state differs"
    for one_group, other_group in zip(together.param_groups, apart.param_groups, strict=True):
        for key in {*one_group, *other_group} - {"params"}:
            if not _equal(one_group.get(key), other_group.get(key)):
                return f"its option {key!r}, which it changes in every step, differs"
    for key, value in together.__dict__.items():
        if _is_number(value) and not _equal(value, apart.__dict__.get(key)):
            return f"its attribute {key!r}, which it changes in every step, differs"
    return ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, torch.Tensor)) and not isinstance(value, bool)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
