"""Find out, before training, whether an optimizer can be stepped a few parameters at a time."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable

from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.errors import UnsupportedGradientError, UnsupportedOptimizerError
from ddp_optim_overlap.partial_steps import PartialSteps, parameters_of, stand_in
from dist_utils.torch_compat import FUSED_CHECK, OperatorWatch, tensor_version

__all__ = ["require_plain_step", "require_sparse_support", "require_step_per_parameter"]

_SCALES = (100.0, 1.0, 1e-3)
"""Of the gradients in the trial's steps: some above and some below whatever limit an optimizer may have."""
_TRIAL_VALUES = 2**20
"""Of all parameters in the trial together: four copies are made of them and of their state."""
_LEAST_RATE = 0.01
"""A warm-up may begin with a learning rate of zero, under which nothing would show."""
_OF_EVERY_OPTIMIZER = frozenset(torch.optim.Optimizer([torch.zeros(1)], {}).__dict__) - {"defaults"}
"""Attributes that say nothing about the step: hooks, mostly; groups and state are copied apart."""


def require_plain_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise unless ``optimizer.step()`` needs no closure, no peer and no other optimizer.

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
    inner = next((key for key, value in optimizer.__dict__.items() if _has_optimizer(value)), None)
    if inner is not None:
        raise UnsupportedOptimizerError(
            f"{name} has another optimizer in its attribute {inner!r}, which would step all of its "
            "parameters whenever some are stepped: use the ordinary loop"
        )
    on_instance = optimizer.__dict__.get("step")
    if _is_compiled(on_instance):
        raise UnsupportedOptimizerError(
            f"step of this {name} is compiled: what is stepped by buckets is not, and has other bits"
        )
    if on_instance is not None and inspect.unwrap(on_instance) is not inspect.unwrap(type(optimizer).step):
        raise UnsupportedOptimizerError(
            f"step was replaced on this {name}: what replaced it would not run for a part of the parameters"
        )


def require_step_per_parameter(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> None:
    """Raise unless stepping parameters apart gives the bits of stepping them together.

    Tried on copies of two small parameters of each group, with the optimizer's own options and state. What
    couples parameters (a norm over all of them, a counter of calls, random numbers) shows there.

    Args:
        optimizer: Left as it is.
        sparse: Parameters with sparse gradients, which take no part.

    Raises:
        UnsupportedOptimizerError: The results, the states, the options or the attributes differ, the step
            fails, or it steps something else than the parameters in the groups.
    """
    name = type(optimizer).__name__
    chosen = _smallest_of_groups(optimizer, sparse)
    if not chosen:
        return
    versions = _versions(optimizer)
    fresh, together, apart, backwards = (_trial(optimizer, chosen) for _ in range(4))
    try:
        with OperatorWatch(partial(_refuse_collective, name)):
            _try_steps(together, apart, backwards, generators=_generators(chosen))
    except UnsupportedOptimizerError:
        raise
    except Exception as error:
        raise UnsupportedOptimizerError(
            f"the step of {name} failed on copies of small parameters: {type(error).__name__}: {error}"
        ) from error
    if _versions(optimizer) != versions:
        raise UnsupportedOptimizerError(
            f"the step of {name} has changed parameters that are not in its groups: this trial has stepped "
            "the model. Use the ordinary loop"
        )
    if not _tensors_differ(fresh, together):
        raise UnsupportedOptimizerError(
            f"the step of {name} does not move the parameters in its groups: use the ordinary loop"
        )
    difference = _difference(together, apart) or _difference(together, backwards)
    if difference:
        raise UnsupportedOptimizerError(
            f"{name} does not step per parameter: {difference} when parameters are stepped apart. "
            "Use OverlapMode.AFTER_REDUCE, which steps all at once"
        )


def _refuse_collective(optimizer: str, operator: str) -> None:
    if operator.startswith(("c10d::", "_c10d_functional::")):
        raise UnsupportedOptimizerError(
            f"the step of {optimizer} communicates ({operator}), which would meet DDP's own collectives when "
            "it is done by buckets. Use OverlapMode.AFTER_REDUCE, which steps when these are over"
        )


def _try_steps(
    together: torch.optim.Optimizer,
    apart: torch.optim.Optimizer,
    backwards: torch.optim.Optimizer,
    generators: Sequence[torch.Generator],
) -> None:
    """Step the first as it is, the others one parameter at a time, in either direction."""
    with _restored(generators):
        for step, scale in enumerate(_SCALES):
            for run in (together, apart, backwards):
                _set_gradients(run, scale, seed=step)
                for generator in generators:
                    generator.manual_seed(step)  # for optimizers that add noise
                if run is together:
                    run.step()
                    continue
                parts = PartialSteps([run])
                for parameter in parameters_of(run)[:: 1 if run is apart else -1]:
                    parts.step([parameter])


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
    (copied,) = parameters_of(run)
    copied.grad = torch.ones_like(copied).to_sparse(1)
    try:
        run.step()
    except Exception as error:
        raise UnsupportedGradientError(
            f"{type(optimizer).__name__} cannot step {name}, whose gradient is sparse: {error}. "
            "Use SGD, Adagrad or SparseAdam for it, or an embedding with sparse=False"
        ) from error


def _smallest_of_groups(
    optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]
) -> list[tuple[int, torch.Tensor]]:
    """Return the smallest pair of each group, but no more than is cheap to copy, with the groups' numbers."""
    sparse_ids = {id(parameter) for parameter in sparse}
    pairs = []
    for number, group in enumerate(optimizer.param_groups):
        candidates = [
            parameter
            for parameter in group["params"]
            if parameter.requires_grad and parameter.numel() and id(parameter) not in sparse_ids
        ]
        candidates.sort(key=torch.Tensor.numel)
        # One that has never been stepped is in no list of an ordinary step with one that has.
        stepped = [parameter for parameter in candidates if optimizer.state.get(parameter)]
        fresh = [parameter for parameter in candidates if not optimizer.state.get(parameter)]
        pairs.append([(number, one) for one in (stepped if len(stepped) > 1 else fresh or stepped)[:2]])
    pairs.sort(key=lambda pair: sum(parameter.numel() for _, parameter in pair))
    chosen: list[tuple[int, torch.Tensor]] = []
    values = 0
    for pair in filter(None, pairs):
        values += sum(parameter.numel() for _, parameter in pair)
        if values > _TRIAL_VALUES and chosen:
            break
        chosen += pair
    return sorted(chosen, key=lambda pair: pair[0])


def _trial(
    optimizer: torch.optim.Optimizer, chosen: Sequence[tuple[int, torch.Tensor]], rows: int | None = None
) -> torch.optim.Optimizer:
    """Return an optimizer as this one, with copies of some parameters and of all that may change."""
    state: defaultdict[Any, Any] = defaultdict(dict)
    groups: dict[int, dict[str, Any]] = {}
    # What else refers to a parameter must not lead back to the user's, nor copy a whole model.
    memo: dict[int, Any] = {
        id(parameter): torch.empty_like(parameter, device="meta") for parameter in parameters_of(optimizer)
    }
    for number, parameter in chosen:
        copied = _rows(parameter.detach(), rows).clone().requires_grad_()
        memo[id(parameter)] = copied
        group = groups.setdefault(number, {"params": []})
        group["params"].append(copied)
        if parameter in optimizer.state:
            state[copied] = {
                key: _rows(value, rows).clone()
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                else copy.deepcopy(value, memo)
                for key, value in optimizer.state[parameter].items()
            }
    for owner, value in _shared_state(optimizer).items():
        state[owner] = copy.deepcopy(value, memo)
    for number, group in groups.items():
        original = optimizer.param_groups[number]
        group.update({key: copy.deepcopy(value, memo) for key, value in original.items() if key != "params"})
        if isinstance(group.get("lr"), torch.Tensor):
            group["lr"].clamp_(min=_LEAST_RATE)
        elif isinstance(group.get("lr"), (int, float)):
            group["lr"] = max(group["lr"], _LEAST_RATE)
        memo[id(original)] = group
    run = stand_in(optimizer, list(groups.values()))
    run.state = state
    memo |= {
        id(optimizer): run,
        id(optimizer.state): state,
        id(optimizer.param_groups): run.param_groups,
    }
    for key, value in _own_attributes(run).items():
        with contextlib.suppress(Exception):  # a lock, a process group: cannot be copied, and stays
            run.__dict__[key] = copy.deepcopy(value, memo)
    return run


def _rows(tensor: torch.Tensor, count: int | None) -> torch.Tensor:
    return tensor[:count] if tensor.dim() else tensor


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {key: value for key, value in optimizer.__dict__.items() if key not in _OF_EVERY_OPTIMIZER}


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter."""
    state: Mapping[Any, Any] = optimizer.state
    return {owner: value for owner, value in state.items() if not isinstance(owner, torch.Tensor)}


def _is_compiled(step: Any) -> bool:
    while step is not None:
        if hasattr(step, "_torchdynamo_orig_callable"):
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _has_optimizer(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        return any(map(_has_optimizer, value))
    return isinstance(value, torch.optim.Optimizer)


def _versions(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return how often each parameter and each tensor of the state was written."""
    states = [state.values() for state in optimizer.state.values() if isinstance(state, dict)]
    tensors = [*parameters_of(optimizer), *(value for values in states for value in values)]
    return [
        tensor_version(tensor)
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    ]


def _generators(chosen: Sequence[tuple[int, torch.Tensor]]) -> list[torch.Generator]:
    devices = {parameter.device.index for _, parameter in chosen if parameter.device.type == "cuda"}
    return [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]


@contextlib.contextmanager
def _restored(generators: Sequence[torch.Generator]) -> Iterator[None]:
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _set_gradients(run: torch.optim.Optimizer, scale: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters_of(run):
        dtype = torch.complex64 if parameter.is_complex() else torch.float32
        values = torch.randn(parameter.shape, generator=generator, dtype=dtype) * scale
        parameter.grad = torch.empty_like(parameter).copy_(values)


def _tensors_differ(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> str:
    for first, second in zip(parameters_of(one), parameters_of(other), strict=True):
        if not equal(first.detach(), second.detach()):
            return "other values come out"
        if not equal(dict(one.state[first]), dict(other.state[second])):
            return "its state differs"
    return ""


def _difference(together: torch.optim.Optimizer, apart: torch.optim.Optimizer) -> str:
    if found := _tensors_differ(together, apart):
        return found
    if not equal(_shared_state(together), _shared_state(apart)):
        return "its state, where it belongs to no parameter, differs"
    for one_group, other_group in zip(together.param_groups, apart.param_groups, strict=True):
        for key in {*one_group, *other_group} - {"params"}:
            if not equal(one_group.get(key), other_group.get(key)):
                return f"its option {key!r}, which it changes in every step, differs"
    one_own, other_own = _own_attributes(together), _own_attributes(apart)
    for key in {*one_own, *other_own} - {FUSED_CHECK}:
        if not equal(one_own.get(key), other_own.get(key)):
            return f"its attribute {key!r}, which it changes in every step, differs"
    return ""
