"""One optimizer per parameter, stepped inside backward: counterparts of PyTorch's optimizer in backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.model import averaged_parameters
from ddp_optim_overlap.optimizers.admission import require_plain_step
from ddp_optim_overlap.optimizers.partial_steps import note_writes
from ddp_optim_overlap.optimizers.stepper import ParameterwiseOptimizer, Stepper
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.slot import (
    EngineSlot,
    another_hook,
    before_start,
    comm_hooks,
    register_comm_hook,
    slot_of,
    start_before_forward,
)
from dist_utils.comm_hooks import CommHook

_OURS = "_ddp_optim_overlap"
"""The attribute of a parameter that holds its :class:`_InBackward`."""


class _InBackward:
    """The optimizers of one parameter, and the models that average it before it is stepped."""

    def __init__(self) -> None:
        self.optimizers: list[torch.optim.Optimizer] = []
        self.registered = False
        self.averaged_by: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[_InBackward], tuple[()]]:
        return _InBackward, ()  # a copy of the parameter has neither a hook nor an optimizer

    def step(self, parameter: torch.Tensor) -> None:
        """Step with the gradient of this process, unless a DDP model averages it first."""
        if self.optimizers and not self.averaged_by:
            _step_with_own(parameter)
            parameter.grad = None


def apply_optimizer_in_backward(
    optimizer_class: type[torch.optim.Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: dict[str, Any],
    register_hook: bool = True,
) -> None:
    """Give each parameter its own optimizer, which ``backward()`` steps; gradients are ``None`` afterwards.

    Outside DDP a parameter is stepped as soon as its gradient is complete. When a
    ``DistributedDataParallel`` model with such parameters is called, or a module given to ``replicate()``, it
    gets :func:`apply_optim_in_backward_hook`: its parameters are stepped once they are averaged.

    Args:
        optimizer_class: Made once per parameter. A second call for a parameter adds another optimizer.
        params: The parameters.
        optimizer_kwargs: Keyword arguments for every optimizer.
        register_hook: Whether parameters are also stepped outside DDP.

    Raises:
        UnsupportedOptimizerError: The optimizer's step needs a closure.
        ConfigError: A parameter is frozen or not a leaf, and ``register_hook`` is true; nothing is registered
            then. Also in the model's forward pass, if the model has another communication hook, or options
            with which buckets come too late or not at all; and in ``backward()``, if a parameter was frozen
            when DDP was made.

    Cost:
        One optimizer object per parameter; see the README for the time of their steps. Prefer
        :func:`overlap_optimizer`, which has one in all. The next call of every DDP model in this process
        looks at its parameters.

    Source:
        ``torch.distributed.optim._apply_optimizer_in_backward``.

    Example:
        >>> apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})  # doctest: +SKIP
        >>> ddp = DistributedDataParallel(net)  # doctest: +SKIP
        >>> ddp(batch).mean().backward()  # steps  # doctest: +SKIP
    """
    make: Any = optimizer_class
    chosen = dict.fromkeys(params)  # a tied weight may be given twice
    if register_hook:
        _require_trained(chosen)
    made = [(parameter, make([parameter], **optimizer_kwargs)) for parameter in chosen]
    for _, optimizer in made:  # nothing is registered if one is refused
        require_plain_step(optimizer)
    for parameter, optimizer in made:
        ours: _InBackward | None = getattr(parameter, _OURS, None)
        if ours is None:
            ours = _InBackward()
            setattr(parameter, _OURS, ours)
        if register_hook and not ours.registered:
            parameter.register_post_accumulate_grad_hook(ours.step)  # type: ignore[no-untyped-call]
            ours.registered = True
        ours.optimizers.append(optimizer)
    _claimed.clear()
    start_before_forward()


def _require_trained(parameters: Iterable[torch.Tensor]) -> None:
    """Raise if one of the parameters gets no gradient that could be noticed."""
    for parameter in parameters:
        if not (parameter.requires_grad and parameter.is_leaf):
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} gets no gradient of its own, as it is frozen "
                "or not a leaf: leave it out, or set requires_grad before apply_optimizer_in_backward"
            )


def get_in_backward_optimizers(module: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers that :func:`apply_optimizer_in_backward` has given a module's parameters.

    Args:
        module: Any module, DDP or not.

    Source:
        ``torch.distributed.optim._get_in_backward_optimizers``.
    """
    return [optimizer for parameter in module.parameters() for optimizer in _optimizers_of(parameter)]


def apply_optim_in_backward_hook(gradient_is_bucket_view: bool) -> CommHook:
    """Return a communication hook that averages, steps each parameter's own optimizers, and drops gradients.

    Args:
        gradient_is_bucket_view: The model's ``gradient_as_bucket_view``. Kept for PyTorch's signature;
            either value works for any model.

    Returns:
        A hook for one model. Its state may be the model, a weak reference to it, a process group, or
        ``None`` for WORLD. A parameter that no rank has used is left alone.

    Raises:
        OverlapError: In ``backward()``, as with :func:`overlap_optimizer`.

    Cost:
        The same as for :func:`overlap_optimizer`, with one optimizer object per parameter.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks._apply_optim_in_backward_hook``,
        which fails without an accelerator.

    Example:
        >>> ddp.register_comm_hook(None, apply_optim_in_backward_hook(False))  # doctest: +SKIP
    """
    del gradient_is_bucket_view

    def make(ddp: DistributedDataParallel, hook_state: object) -> Engine:
        del hook_state
        _of_models[ddp] = each = ParameterwiseOptimizer(_parameters_with_own(ddp), _step_with_own)
        return Engine(ddp, Stepper([each], drops_gradients=True), None, None, skips_unused=True)

    start_before_forward()
    return EngineSlot(make).hook


def _step_with_own(parameter: torch.Tensor) -> None:
    """Step a parameter with each of its own optimizers."""
    note_writes([parameter])
    for optimizer in _optimizers_of(parameter):
        optimizer.step()


def _optimizers_of(parameter: torch.Tensor) -> list[torch.optim.Optimizer]:
    ours: _InBackward | None = getattr(parameter, _OURS, None)
    return [] if ours is None else ours.optimizers


_of_models: weakref.WeakKeyDictionary[DistributedDataParallel, ParameterwiseOptimizer] = (
    weakref.WeakKeyDictionary()
)

_claimed: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
"""Models that have been called since the last call of :func:`apply_optimizer_in_backward`."""


def _parameters_with_own(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the averaged parameters that have optimizers of their own.

    Others are stepped with the gradients of this rank, as in PyTorch.
    """
    return [parameter for parameter in averaged_parameters(ddp) if _optimizers_of(parameter)]


def _claim(ddp: DistributedDataParallel) -> None:
    """Give a model a hook that averages and then steps, if its parameters have optimizers of their own."""
    if ddp in _claimed:
        return
    for parameter in getattr(ddp, "_delay_all_reduce_params", ()):
        if _optimizers_of(parameter):
            raise ConfigError(
                "an optimizer in backward has a parameter of delay_all_reduce_named_params, which DDP "
                "averages after all others: leave it out there, or give it an optimizer that the loop steps"
            )
    if found := _parameters_with_own(ddp):
        if not comm_hooks(ddp):
            hook = apply_optim_in_backward_hook(ddp.gradient_as_bucket_view)
            register_comm_hook(ddp, slot_of(hook), hook)  # a state that can be saved with the model
        for hook, _ in comm_hooks(ddp):
            slot = slot_of(hook)
            if slot is None or slot.make is None:
                raise another_hook(hook)
        if ddp in _of_models:
            _of_models[ddp].param_groups[0]["params"] = found
    for parameter in found:
        getattr(parameter, _OURS).averaged_by.add(ddp)
    _claimed.add(ddp)


before_start.append(_claim)
