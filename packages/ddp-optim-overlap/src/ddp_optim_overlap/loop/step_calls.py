"""The loop's calls of ``optimizer.step()`` while backward passes step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, Protocol

import torch

from ddp_optim_overlap.errors import ConfigError, OverlapError
from ddp_optim_overlap.loop.gradient_watch import GradientWatch, is_capturing
from ddp_optim_overlap.loop.replaced_step import Answers, ReplacedStep, require_ended
from ddp_optim_overlap.loop.step_inputs import Comparison, StepInputs
from ddp_optim_overlap.optimizers.partial_steps import parameters_of
from ddp_optim_overlap.optimizers.step_hooks import step_post_hooks, step_pre_hooks
from ddp_optim_overlap.phase import OverlapState, Phase

__all__ = ["Overlap", "StepCalls"]


class Overlap(Protocol):
    """What the loop asks an engine.

    Attributes:
        state: What the overlap is doing.
        gradients: Which gradients have come.
    """

    state: OverlapState
    gradients: GradientWatch

    @property
    def paused(self) -> bool:
        """Whether passes are only averaged."""

    @property
    def releases(self) -> bool:
        """Whether gradients are freed when they are stepped with."""

    def require_outside_pass(self) -> None:
        """Raise the first error, or raise if a backward pass runs or was left."""

    def fail(self, error: OverlapError) -> OverlapError:
        """Keep an error as the first one, and tell the other ranks; return what is to be raised."""


class _Habit(Enum):
    """What the loop does after a pass that has stepped."""

    UNKNOWN = "nothing was seen yet"
    CALLS = "it calls step()"
    LEAVES_OUT = "it does not call step()"


class StepCalls(Answers):
    """Makes the loop's calls of ``optimizer.step()`` harmless after a backward pass that has stepped.

    The first call does not step. It checks that the inputs of the step were not changed afterwards, raises
    errors with their type, and runs the optimizer's step hooks. A closure runs first; its backward pass may
    be the one that steps. Any other call is an ordinary step.

    Args:
        optimizers: The user's optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._overlap: weakref.ref[Overlap] | None = None
        self._replaced: list[ReplacedStep] = []
        self._pending: dict[torch.optim.Optimizer, StepInputs] = {}
        """The optimizers that the last pass stepped and whose ``step()`` was not called since."""
        self._habit = _Habit.UNKNOWN
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unread: list[Comparison] = []
        """Comparisons on accelerators, whose answers are read late to avoid waiting."""

    def attach(self, overlap: Overlap) -> None:
        """Follow the passes of this engine.

        Raises:
            ConfigError: An optimizer is overlapped already.
        """
        if self._overlap is not None:
            require_ended(weakref.ref(self), type(self._optimizers[0]).__name__)
        self.replace()
        self._overlap = weakref.ref(overlap)  # the engine refers to this object: a cycle otherwise

    def replace(self) -> None:
        """Replace ``optimizer.step()``; done before an engine is made, for the sake of closures.

        Raises:
            ConfigError: An optimizer is overlapped already.
        """
        if not self._replaced:
            self._replaced = [ReplacedStep(optimizer, self) for optimizer in self._optimizers]

    def is_active(self) -> bool:
        """Whether passes may step: an engine does, or one is still to be made."""
        if self._overlap is None:
            return True
        overlap = self._overlap()
        return overlap is not None and overlap.state.phase is not Phase.REMOVED

    def remove(self) -> bool:
        """Restore ``optimizer.step()``, unless the call for a pass that has stepped is still to come.

        Returns:
            Whether it is still to come.
        """
        pending = any(map(self.is_pending, self._optimizers))
        if not pending:
            self._leave()
        return pending

    def begin(self) -> None:
        """Check the loop when a backward pass that will step begins.

        Raises:
            ConfigError: The loop does not call ``step()`` as it must.
        """
        self.require_unchanged()
        self._refuse_left_out_call()
        for optimizer in self._pending:
            if step_post_hooks(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step post-hook, which runs in step(), and step() was "
                    "not called for the last backward pass: call it after each one, or take the hook away"
                )
        if self._pending:
            self._habit = _Habit.LEAVES_OUT

    def finish(self, stepped: dict[torch.optim.Optimizer, StepInputs]) -> None:
        """Record the optimizers that a backward pass has stepped."""
        self._pending = stepped

    def require_unchanged(self) -> None:
        """Raise if an accelerator has found that a step's inputs were changed after the step.

        Raises:
            ConfigError: They were. It is raised again until the overlap is removed.
        """
        if is_capturing():
            return  # the next pass reads the answers
        unread, self._unread = self._unread, []
        if any(comparison.found() for comparison in unread):
            self._refuse_change(_SAMPLED, "the last backward() and its step()")

    def is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last pass has stepped an optimizer whose ``step()`` was not called since."""
        overlap = self._current()
        return (
            overlap is not None
            and optimizer in self._pending
            and overlap.state.phase in (Phase.STEPPED, Phase.CLOSURE, Phase.REMOVED)
            and overlap.gradients.none_since_step
        )

    def before_closure(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object] | None:
        """Return a context for a closure, which may step; ``None`` if the ordinary step is to run it."""
        overlap = self._current()
        if overlap is None:
            return contextlib.nullcontext() if self._replaced else None  # the closure may make the engine
        pending = self.is_pending(optimizer)
        if overlap.paused or overlap.state.phase is Phase.REMOVED:
            if pending:
                raise ConfigError("the parameters are stepped already: a closure would come too late")
            return None
        overlap.require_outside_pass()
        self._refuse_late_call(overlap, optimizer)
        self._habit = _Habit.CALLS  # the closure's pass may step
        return _closure_running(overlap, pending=pending)

    def is_done(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> bool:
        """Whether this call of ``optimizer.step()`` has nothing left to do; raises pending errors.

        Args:
            optimizer: One of the optimizers.
            given: The non-empty arguments of the call by name, without the closure, which has run.
        """
        overlap = self._current()
        if overlap is None:
            return False
        removed = overlap.state.phase is Phase.REMOVED
        if not removed:
            overlap.require_outside_pass()
        if self.is_pending(optimizer):
            if given:
                raise ConfigError(
                    f"the parameters are stepped already: {', '.join(given)} for step() would come too late"
                )
            self._settle(overlap, optimizer)
            return True
        if self._pending:
            self._forget_pending(overlap)
        if removed:
            self._leave()
        elif overlap.releases and overlap.gradients.none_since_step:
            _require_gradients(optimizer)
        return False  # an ordinary step, after pause() or no_sync() or once more

    def _leave(self) -> None:
        while self._replaced:
            self._replaced.pop().restore()
        self._pending.clear()
        overlap = self._current()
        if overlap is not None and overlap.state.phase is Phase.REMOVED:
            overlap.gradients.stop()

    def _current(self) -> Overlap | None:
        return None if self._overlap is None or not self._replaced else self._overlap()

    def _refuse_left_out_call(self) -> None:
        """Raise if the loop has called ``step()`` after earlier passes and not after the last one."""
        if self._pending and self._habit is _Habit.CALLS:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._pending)
            raise ConfigError(
                f"step() of {names} was not called after the last backward pass, as it was before, and that "
                "pass has stepped already. Call handle.pause() around a backward pass that is to step "
                "nothing, or not everything"
            )

    @staticmethod
    def _refuse_used_gradients(overlap: Overlap) -> None:
        """Raise if gradients have come since the last pass, and some that it has used are still there."""
        if overlap.gradients.some_used_are_left():
            raise ConfigError(
                "gradients have come between backward() and step(), after the step had been done: let all of "
                "them come in no_sync() passes before the last one, or use the ordinary loop with the same "
                "communication hook"
            )

    def _forget_pending(self, overlap: Overlap) -> None:
        """Forget a pass whose ``step()`` was left out before an ordinary one; raise if that is none."""
        try:
            self._refuse_left_out_call()
            self._refuse_used_gradients(overlap)
        except ConfigError as error:
            raise overlap.fail(error) from None
        self._pending.clear()
        self._habit = _Habit.LEAVES_OUT
        if overlap.state.phase is Phase.STEPPED:
            overlap.state.settle()

    def _settle(self, overlap: Overlap, optimizer: torch.optim.Optimizer) -> None:
        """Match a call of ``step()`` with the step of the last pass; raise if they do not fit."""
        self._refuse_late_call(overlap, optimizer)
        inputs = self._pending[optimizer]
        changed = inputs.changed(optimizer)
        if changed is None and getattr(optimizer, "found_inf", None) is not None:
            changed = "a GradScaler called step()"
        if changed is not None:
            self._refuse_change(changed, "backward() and step()")
        self._compare_on_device(optimizer, inputs)
        self._habit = _Habit.CALLS
        del self._pending[optimizer]
        if not self._pending:
            overlap.state.settle()
            if overlap.state.phase is Phase.REMOVED:
                self._leave()
        if step_pre_hooks(optimizer) or step_post_hooks(optimizer):
            _run_step_hooks(optimizer)

    def _compare_on_device(self, optimizer: torch.optim.Optimizer, inputs: StepInputs) -> None:
        """Start a comparison of what lies on accelerators; wait for the first one of an optimizer.

        A loop that clips gradients does so from its first step on. Later calls let the device continue, and
        the next backward pass reads the answer.
        """
        comparison = inputs.compare_on_device()
        if comparison is None:
            return
        if optimizer in self._compared:
            self._unread.append(comparison)
            return
        self._compared.add(optimizer)
        if comparison.found():
            self._refuse_change(_SAMPLED, "backward() and step()")

    def _refuse_change(self, changed: str, where: str) -> None:
        error = ConfigError(
            f"{changed} between {where}, after the step had been done: do it before backward(), pass clip= "
            "to overlap_optimizer, or use the ordinary loop with the same communication hook. For a norm "
            "that is only looked at: torch.nn.utils.get_total_norm"
        )
        overlap = self._current()
        raise error if overlap is None else overlap.fail(error)

    def _refuse_late_call(self, overlap: Overlap, optimizer: torch.optim.Optimizer) -> None:
        """Raise if passes stepped more than this call of ``step()`` stands for, or in a different order."""
        if self._habit is _Habit.LEAVES_OUT and self._pending:
            raise overlap.fail(
                ConfigError(
                    "several backward passes have stepped, and step() is called for the first time: each of "
                    "them was a step. Call step() after every backward pass or after none, and "
                    "handle.pause() around a backward pass that is to step nothing"
                )
            )
        for earlier in self._optimizers[: self._optimizers.index(optimizer)]:
            if earlier not in self._pending:
                continue
            if not set(parameters_of(optimizer)).isdisjoint(parameters_of(earlier)):
                raise ConfigError(
                    f"{type(optimizer).__name__} and {type(earlier).__name__} have parameters in common, and "
                    "step in the order in which they were given to overlap_optimizer: call step() in it too"
                )


_SAMPLED = "gradients or parameters were changed (clipped, unscaled, ...)"


@contextlib.contextmanager
def _closure_running(overlap: Overlap, *, pending: bool) -> Iterator[None]:
    with overlap.state.closure() if pending else contextlib.nullcontext():
        try:
            yield
        except RuntimeError:  # backward() raises its errors as RuntimeError
            overlap.state.raise_error()
            raise


def _require_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an ordinary step finds no gradients because they were freed."""
    if all(parameter.grad is None for parameter in parameters_of(optimizer)):
        raise ConfigError(
            "step() was called once more, and with release_gradients=True the gradients are gone: leave "
            "that out to step with them again"
        )


@torch.optim.Optimizer.profile_hook_step
def _run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step hooks around an empty step."""
