"""Counterparts of PyTorch's ``_hook_then_optimizer`` and ``_register_fused_optim``."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.model import averaged_parameters, require_group
from ddp_optim_overlap.optimizers.admission import require_supported
from ddp_optim_overlap.optimizers.step_calls import LoopStepper
from ddp_optim_overlap.optimizers.stepper import ParameterwiseOptimizer, Stepper
from ddp_optim_overlap.overlap import OverlapHandle, overlap_optimizer
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.slot import EngineSlot, start_before_forward
from dist_utils.comm_hooks import CommHook


class FunctionalOptimizer(Protocol):
    """What PyTorch calls a functional optimizer: steps one parameter with a given gradient."""

    def step_param(self, param: torch.Tensor, grad: torch.Tensor | None) -> None:
        """Step one parameter."""


class OptimizerHookState:
    """The optimizer and the parameters that :func:`hook_then_optimizer` steps.

    Args:
        functional_optim: An object with ``step_param(param, grad)``, or any ``torch.optim`` optimizer
            that :func:`overlap_optimizer` takes. The optimizer's own ``step()`` may stay in the loop, and
            finds nothing left to do.
        params: The parameters to step; ``None`` for all parameters of the optimizer or, with ``step_param``,
            of the model.
        steps_per_parameter: As for :func:`overlap_optimizer`.

    Raises:
        ValueError: ``functional_optim`` is neither of the two.
        UnsupportedOptimizerError: The optimizer does not step per parameter.
        ConfigError: It has a step pre-hook, which would run too late, or parameters that share memory, or is
            overlapped already.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks._OptimizerHookState``.

    Example:
        >>> state = OptimizerHookState(torch.optim.AdamW(ddp.parameters()))  # doctest: +SKIP
    """

    def __init__(
        self,
        functional_optim: FunctionalOptimizer | torch.optim.Optimizer,
        params: Iterable[torch.Tensor] | None = None,
        *,
        steps_per_parameter: bool = False,
    ) -> None:
        self.functional_optimizer = functional_optim
        self.params_to_optimize = None if params is None else set(params)
        if isinstance(functional_optim, torch.optim.Optimizer):
            require_supported([functional_optim], declared=steps_per_parameter, sparse={})
            self._stepper = LoopStepper([functional_optim], only=self.params_to_optimize)
            self._stepper.replace_steps()
        elif not callable(getattr(functional_optim, "step_param", None)):
            raise ValueError(  # noqa: TRY004 - as PyTorch does
                f"{type(functional_optim).__name__} is not a torch.optim.Optimizer and has no "
                "step_param(param, grad)"
            )

    def stepper_for(self, ddp: DistributedDataParallel) -> Stepper:
        """Return what steps a model's parameters."""
        functional = self.functional_optimizer
        if isinstance(functional, torch.optim.Optimizer):
            return self._stepper
        chosen = self.params_to_optimize
        parameters = averaged_parameters(ddp) if chosen is None else chosen
        return Stepper([ParameterwiseOptimizer(parameters, lambda one: functional.step_param(one, one.grad))])


def hook_then_optimizer(hook: CommHook, optimizer_state: OptimizerHookState) -> CommHook:
    """Return a communication hook that steps each bucket's parameters once ``hook`` has averaged them.

    Args:
        hook: Any communication hook; the value of its future is used.
        optimizer_state: What to step.

    Returns:
        A hook for ``register_comm_hook``, whose state is that of ``hook``. For one model only, which finds it
        when it is called: register it before, and not inside another hook.

    Raises:
        TypeError: ``hook`` is not callable, or ``optimizer_state`` is not an :class:`OptimizerHookState`.
        OverlapError: When the model is called, and in ``backward()``, as with :func:`overlap_optimizer`.

    Cost:
        The same as for :func:`overlap_optimizer`.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks._hook_then_optimizer``. Like it,
        and unlike :func:`overlap_optimizer`, this steps a parameter that no rank has used, with a zero
        gradient.

    Example:
        >>> hook = hook_then_optimizer(allreduce_hook, state)  # doctest: +SKIP
        >>> ddp.register_comm_hook(None, hook)  # doctest: +SKIP
    """
    if not callable(hook):
        raise TypeError(f"hook must be a communication hook, got {type(hook).__name__}")
    if not isinstance(optimizer_state, OptimizerHookState):
        raise TypeError(
            f"optimizer_state must be an OptimizerHookState, got {type(optimizer_state).__name__}"
        )

    def make(ddp: DistributedDataParallel, hook_state: object) -> Engine:
        require_group(ddp, hook, hook_state)
        stepper = optimizer_state.stepper_for(ddp)
        engine = Engine(ddp, stepper, hook, hook_state)
        stepper.attach(engine)
        return engine

    start_before_forward()
    return EngineSlot(make).hook


def register_fused_optim(
    ddp: DistributedDataParallel,
    optim: type[torch.optim.Optimizer],
    *args: Any,
    optim_params: Iterable[torch.Tensor] | None = None,
    **kwargs: Any,
) -> OverlapHandle:
    """Make an optimizer of a model's parameters and overlap its steps.

    Args:
        ddp: The model.
        optim: The optimizer's class.
        *args: Its positional arguments after the parameters.
        optim_params: The parameters to optimize; ``None`` for all parameters of ``ddp``.
        **kwargs: Its keyword arguments.

    Returns:
        A handle; ``handle.optimizers[0]`` is the optimizer, for schedulers and checkpoints.

    Raises:
        OverlapError: What :func:`overlap_optimizer` raises. Errors of ``optim`` are passed on unchanged.

    Source:
        ``DistributedDataParallel._register_fused_optim``.

    Example:
        >>> handle = register_fused_optim(ddp, torch.optim.Adam, 1e-2, betas=(0.9, 0.99))  # doctest: +SKIP
    """
    parameters = list(ddp.parameters() if optim_params is None else optim_params)
    make: Any = optim
    return overlap_optimizer(ddp, make(parameters, *args, **kwargs))
