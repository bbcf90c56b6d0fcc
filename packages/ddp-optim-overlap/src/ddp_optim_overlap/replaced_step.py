"""The replacement of an optimizer's own ``step`` while it is overlapped."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.optimizer_hooks import step_pre_hooks

__all__ = ["ReplacedStep", "has_pre_hooks"]


class ReplacedStep:
    """Replaces an optimizer's ``step``, as schedulers do: it asks first whether anything is left to do.

    A closure runs before that, once, because its backward pass may step. The replacement keeps neither the
    engine nor its thread alive if the optimizer outlives its model.

    A step pre-hook guards the ``step`` of the class, for callers that kept ``optimizer.step`` from before.

    Args:
        optimizer: Its ``step`` is replaced on the instance.
        before_closure: Gets the optimizer; returns a context for the closure, or ``None`` if the ordinary
            step is to run it.
        is_done: Gets the optimizer and its non-empty arguments by name; returns whether nothing is left to
            do.
        is_pending: Gets the optimizer; returns whether the next call of ``step`` is to do nothing.

    Attributes:
        superseded: Whether a later replacement has taken over.
    """

    superseded = False

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before_closure: Callable[[torch.optim.Optimizer], AbstractContextManager[object] | None],
        is_done: Callable[[torch.optim.Optimizer, dict[str, Any]], bool],
        is_pending: Callable[[torch.optim.Optimizer], bool],
    ) -> None:
        earlier: ReplacedStep | None = getattr(optimizer.__dict__.get("step"), "replaced", None)
        if earlier is not None:
            earlier.restore()  # it belongs to an overlap that has ended
            earlier.superseded = True
        self._optimizer = weakref.ref(optimizer)
        self._before = before = optimizer.__dict__.get("step")  # a wrapper that a scheduler has put there
        enter, ask = weakref.WeakMethod(before_closure), weakref.WeakMethod(is_done)
        signature = inspect.signature(type(optimizer).step)

        # No compiler can trace its questions, and the step of a pass is not compiled either.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(self, *args, **kwargs)
            loss = None
            closure = call.arguments.get("closure")
            around = enter()
            if callable(closure) and around is not None and (context := around(self)) is not None:
                with context, torch.enable_grad():
                    loss = closure()
                call.arguments["closure"] = _first_giving(loss, closure)
            asked = ask()
            if asked is not None and asked(self, _given(call)):
                return loss
            args = call.args[1:]
            return before(*args, **call.kwargs) if before else type(self).step(self, *args, **call.kwargs)

        @functools.wraps(before or type(optimizer).step)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return call_step(self, *args, **kwargs)

        step.replaced = self  # type: ignore[attr-defined]
        self._step = optimizer.__dict__["step"] = MethodType(step, optimizer)
        self._guard = optimizer.register_step_pre_hook(_guard(weakref.WeakMethod(is_pending)))

    def restore(self) -> None:
        """Restore the previous ``step``, unless a scheduler has replaced this one."""
        self._guard.remove()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("step") is self._step:
            del optimizer.__dict__["step"]
            if self._before is not None:
                optimizer.__dict__["step"] = self._before


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has step pre-hooks, its own or global, besides the guard of this module."""
    return any(not hasattr(hook, "guards") for hook in step_pre_hooks(optimizer).values())


def _guard(is_pending: weakref.WeakMethod[Any]) -> Callable[..., None]:
    """Return a step pre-hook that raises if the step of a backward pass would be repeated."""

    def guard(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        pending = is_pending()
        if pending is not None and pending(optimizer):
            raise ConfigError(
                f"the last backward pass has stepped {type(optimizer).__name__}, and its class's step() was "
                "called, which would step again: call optimizer.step(), and look it up after "
                "overlap_optimizer, which replaces it"
            )

    guard.guards = True  # type: ignore[attr-defined]
    return guard


def _given(call: inspect.BoundArguments) -> dict[str, Any]:
    """Return the non-empty arguments of a call of ``step``, without the closure."""
    _, *names = call.signature.parameters
    given = {name: call.arguments.get(name) for name in names if name != "closure"}
    return {
        name: value
        for name, value in given.items()
        if value is not None and not (isinstance(value, (tuple, dict)) and not value)
    }


def _first_giving(loss: Any, closure: Callable[[], Any]) -> Callable[[], Any]:
    """Return a closure whose first call returns the loss of an earlier run."""
    losses = [loss]
    return lambda: losses.pop() if losses else closure()
