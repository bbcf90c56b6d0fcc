"""The replacement of an optimizer's own ``step`` while it is overlapped."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Protocol

import torch

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.optimizers.step_hooks import step_pre_hooks

__all__ = ["Answers", "ReplacedStep", "has_pre_hooks"]


class Answers(Protocol):
    """What a replaced ``step`` asks before it steps."""

    def is_active(self) -> bool:
        """Whether passes may step."""

    def before_closure(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object] | None:
        """Return a context for a closure, which may step; ``None`` if the ordinary step is to run it."""

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last pass has stepped an optimizer whose ``step()`` was not called since."""

    def is_done(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> bool:
        """Whether this call, with these non-empty arguments besides the closure, has nothing left to do."""


class ReplacedStep:
    """Replaces an optimizer's ``step``, as schedulers do: it asks first whether anything is left to do.

    A closure runs before that, once, because its backward pass may step. The replacement keeps neither the
    engine nor its thread alive if the optimizer outlives its model.

    A step pre-hook guards the ``step`` of the class, for callers that kept ``optimizer.step`` from before.

    Args:
        optimizer: Its ``step`` is replaced on the instance.
        answers: Is asked; not kept alive.

    Raises:
        ConfigError: It is replaced already, by an overlap that has not ended.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, answers: Answers) -> None:
        weak_answers: Callable[[], Answers | None] = weakref.ref(answers)
        self.answers = weak_answers
        earlier: ReplacedStep | None = getattr(optimizer.__dict__.get("step"), "replaced", None)
        if earlier is not None:
            require_ended(earlier.answers, type(optimizer).__name__)
            earlier.restore()
        self._optimizer = weakref.ref(optimizer)
        self._before = before = optimizer.__dict__.get("step")  # a wrapper that a scheduler has put there
        signature = inspect.signature(type(optimizer).step)

        # No compiler can trace its questions, and the step of a pass is not compiled either.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            call = signature.bind(self, *args, **kwargs)
            loss = None
            closure = call.arguments.get("closure")
            answers = weak_answers()
            if callable(closure) and answers and (around := answers.before_closure(self)) is not None:
                with around, torch.enable_grad():
                    loss = closure()
                call.arguments["closure"] = _first_giving(loss, closure)
            if answers and answers.is_done(self, _given(call)):
                return loss
            args = call.args[1:]
            return before(*args, **call.kwargs) if before else type(self).step(self, *args, **call.kwargs)

        @functools.wraps(before or type(optimizer).step)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return call_step(self, *args, **kwargs)

        step.replaced = self  # type: ignore[attr-defined]
        self._step = optimizer.__dict__["step"] = MethodType(step, optimizer)
        self._guard = optimizer.register_step_pre_hook(_guard(weak_answers))

    def restore(self) -> None:
        """Restore the previous ``step``, unless a scheduler has replaced this one."""
        self._guard.remove()
        optimizer = self._optimizer()
        if optimizer is not None and optimizer.__dict__.get("step") is self._step:
            del optimizer.__dict__["step"]
            if self._before is not None:
                optimizer.__dict__["step"] = self._before


def require_ended(answers: Callable[[], Answers | None], optimizer: str) -> None:
    """Raise if an overlap of an optimizer has not ended.

    Args:
        answers: A weak reference to what it answers with.
        optimizer: The name of the optimizer's class.

    Raises:
        ConfigError: It may still step.
    """

    def is_active() -> bool:
        found = answers()
        return found is not None and found.is_active()

    if is_active():
        gc.collect()  # a model is part of cycles, and may be waiting for this
        if is_active():
            raise ConfigError(
                f"{optimizer} is overlapped already, and both would step it: remove() the earlier overlap "
                "first, or give each model an optimizer of its own"
            )


def has_pre_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has step pre-hooks, its own or global, besides the guard of this module."""
    return any(not hasattr(hook, "guards") for hook in step_pre_hooks(optimizer).values())


def _guard(weak_answers: Callable[[], Answers | None]) -> Callable[..., None]:
    """Return a step pre-hook that raises if the step of a backward pass would be repeated."""

    def guard(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        answers = weak_answers()
        if answers is not None and answers.is_pending(optimizer):
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
