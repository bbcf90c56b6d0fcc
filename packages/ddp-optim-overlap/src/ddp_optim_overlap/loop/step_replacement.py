"""The replacement of an optimizer's own ``step`` while it is overlapped."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ddp_optim_overlap.optimizers.step_hooks import step_pre_hooks


class StepReplacement:
    """Replaces an optimizer's ``step`` on the instance, as schedulers do.

    A step pre-hook guards the ``step`` of the class, for callers that kept ``optimizer.step`` from before.

    Args:
        optimizer: Its ``step`` is replaced.
        owner: What :func:`owner_of_step` returns meanwhile.
        instead: Called with the optimizer, the call's arguments, and what does the ordinary step with them.
        guard: Called with the optimizer before any step of its class.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        owner: object,
        instead: Callable[[torch.optim.Optimizer, inspect.BoundArguments, Callable[[], Any]], Any],
        guard: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._optimizer = optimizer
        self._before = before = optimizer.__dict__.get("step")  # a wrapper that a scheduler has put there
        signature = inspect.signature(type(optimizer).step)

        # No compiler can trace its questions, and the step of a pass is not compiled either.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(self, *args, **kwargs)

            def step_now() -> Any:
                args = call.args[1:]
                return before(*args, **call.kwargs) if before else type(self).step(self, *args, **call.kwargs)

            return instead(self, call, step_now)

        @functools.wraps(before or type(optimizer).step)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return call_step(self, *args, **kwargs)

        def ask_guard(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            guard(optimizer)

        step.owner = owner  # type: ignore[attr-defined]
        ask_guard.guards = True  # type: ignore[attr-defined]
        self._step = optimizer.__dict__["step"] = MethodType(step, optimizer)
        self._guard = optimizer.register_step_pre_hook(ask_guard)

    def restore(self) -> None:
        """Restore the previous ``step``, unless a scheduler has replaced this one."""
        self._guard.remove()
        if self._optimizer.__dict__.get("step") is self._step:
            del self._optimizer.__dict__["step"]
            if self._before is not None:
                self._optimizer.__dict__["step"] = self._before


def owner_of_step(optimizer: torch.optim.Optimizer) -> object | None:
    """Return the owner of the newest replacement of an optimizer's step, also under a scheduler's wrapper."""
    return getattr(optimizer.__dict__.get("step"), "owner", None)


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has step pre-hooks, its own or global, besides the guard of this module."""
    return any(not hasattr(hook, "guards") for hook in step_pre_hooks(optimizer).values())
