"""Counterparts of PyTorch's ``_hook_then_optimizer`` and ``_register_fused_optim``."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.loop.overlapped_optimizers import OverlappedOptimizers
from ddp_optim_overlap.model import require_ddp_options
from ddp_optim_overlap.optimizers.admission import (
    require_plain_step,
    require_separate_memory,
    require_step_per_parameter,
)
from ddp_optim_overlap.optimizers.partial_steps import note_writes
from ddp_optim_overlap.overlap import OverlapHandle, overlap_optimizer
from ddp_optim_overlap.passes.backward_pass import Stepper
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.passes.gradient_watch import GradientWatch, gradient_marks
from ddp_optim_overlap.slot import EngineSlot
from dist_utils import resolve_group
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
            require_plain_step(functional_optim)
            require_separate_memory([functional_optim])
            require_step_per_parameter(functional_optim, declared=steps_per_parameter, sparse={})
            overlapped = OverlappedOptimizers([functional_optim], only=self.params_to_optimize)
            overlapped.calls.replace()
            self.stepper: OverlappedOptimizers | _StepFunctions = overlapped
        elif callable(getattr(functional_optim, "step_param", None)):
            self.stepper = _StepFunctions(functional_optim, self.params_to_optimize)
        else:
            raise ValueError(  # noqa: TRY004 - as PyTorch does
                f"{type(functional_optim).__name__} is not a torch.optim.Optimizer and has no "
                "step_param(param, grad)"
            )


class _StepFunctions(Stepper):
    """Steps one parameter after another with ``step_param``."""

    def __init__(self, functional: FunctionalOptimizer, only: set[torch.Tensor] | None) -> None:
        self._functional = functional
        self._only = only
        self._stepped: list[torch.Tensor] = []

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        for parameter in parameters:
            if self._only is None or parameter in self._only:
                note_writes([parameter])
                self._functional.step_param(parameter, parameter.grad)
                self._stepped.append(parameter)

    def finish(self, gradients: GradientWatch) -> None:
        gradients.mark_as_used(self._stepped, gradient_marks(self._stepped))
        self._stepped = []


def engine_hook(
    make_stepper: Callable[[DistributedDataParallel | None], Stepper],
    comm_hook: CommHook | None,
    *,
    skips_unused: bool,
) -> CommHook:
    """Return a communication hook of one model that makes its engine with the first bucket.

    Args:
        make_stepper: Returns what the engine steps with, given the model if that is known.
        comm_hook: What averages, with the state that the hook was registered with; ``None``: as DDP does.
        skips_unused: As for :class:`Engine`.
    """

    def make(hook_state: object, model: DistributedDataParallel | None) -> Engine:
        if model is not None:
            require_ddp_options(model)
        group = _group_of(hook_state) if model is None else model.process_group
        stepper = make_stepper(model)
        engine = Engine(group, stepper, comm_hook, hook_state, model=model, skips_unused=skips_unused)
        stepper.attach(engine)
        return engine

    return EngineSlot(make).hook


def _group_of(hook_state: Any) -> dist.ProcessGroup:
    """Return the group that a hook's state is or has; WORLD if it has none."""
    named = hook_state() if isinstance(hook_state, weakref.ref) else hook_state
    if isinstance(named, (dist.ProcessGroup, DeviceMesh)):
        return resolve_group(named)
    return resolve_group(getattr(named, "process_group", None))


def hook_then_optimizer(hook: CommHook, optimizer_state: OptimizerHookState) -> CommHook:
    """Return a communication hook that steps each bucket's parameters once ``hook`` has averaged them.

    Args:
        hook: Any communication hook; the value of its future is used.
        optimizer_state: What to step.

    Returns:
        A hook for ``register_comm_hook``, whose state is that of ``hook``. The ranks that train together are
        those of that state if it is or has a process group, else WORLD. For one model only, and without
        DDP's ``skip_all_reduce_unused_params``: as a hook does not know its model, ``backward()`` raises when
        a bucket was left out, or for the last bucket the optimizer's ``step()`` or the next ``backward()``.

    Raises:
        TypeError: ``hook`` is not callable, or ``optimizer_state`` is not an :class:`OptimizerHookState`.
        OverlapError: In ``backward()``, as with :func:`overlap_optimizer`.

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

    return engine_hook(lambda _: optimizer_state.stepper, hook, skips_unused=False)


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
