"""The loop's calls of ``optimizer.step()`` while backward passes step."""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.loop.step_inputs import Comparison, StepInputs
from ddp_optim_overlap.loop.step_replacement import StepReplacement, owner_of_step
from ddp_optim_overlap.optimizers.partial_steps import parameters_of
from ddp_optim_overlap.optimizers.step_hooks import step_post_hooks
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.passes.gradient_watch import is_capturing
from ddp_optim_overlap.passes.phase import OverlapState, Phase


class _Habit(Enum):
    """What the loop does after a pass that has stepped."""

    UNKNOWN = "nothing was seen yet"
    CALLS = "it calls step()"
    LEAVES_OUT = "it does not call step()"


class StepCalls:
    """Makes the loop's calls of ``optimizer.step()`` harmless after a backward pass that has stepped.

    The first call does not step. It checks that the inputs of the step were not changed afterwards, raises
    errors with their type, and runs the optimizer's step hooks. A closure runs first, once; its backward pass
    may be the one that steps. Any other call is an ordinary step.

    Args:
        optimizers: The user's optimizers.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._engine: Callable[[], Engine | None] = lambda: None
        self._state: OverlapState | None = None
        """Kept for the calls of ``step()`` for the last pass, even if the engine is gone with the model."""
        self._replacements: list[StepReplacement] = []
        self._pending: dict[torch.optim.Optimizer, StepInputs] = {}
        """The optimizers that the last pass stepped and whose ``step()`` was not called since."""
        self._habit = _Habit.UNKNOWN
        self._compared: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unread: list[Comparison] = []
        """Comparisons on accelerators, whose answers are read late to avoid waiting."""

    # ---- an overlap begins and ends ----

    def replace(self) -> None:
        """Replace ``optimizer.step()``; done before an engine is made, for the sake of closures.

        Raises:
            ConfigError: An optimizer is overlapped already.
        """
        if self._replacements:
            return
        for optimizer in self._optimizers:
            earlier = owner_of_step(optimizer)
            if isinstance(earlier, StepCalls):
                earlier.require_ended(optimizer)
                earlier.restore()
        self._replacements = [StepReplacement(one, self, self._call, self._guard) for one in self._optimizers]

    def attach(self, engine: Engine) -> None:
        """Follow the passes of this engine.

        Raises:
            ConfigError: An optimizer is overlapped already.
        """
        if self._state is not None:
            self.require_ended(self._optimizers[0])
        self.replace()
        self._engine, self._state = weakref.ref(engine), engine.state

    def require_ended(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if passes may still step this optimizer, or its call for a pass that has stepped is to come.

        Raises:
            ConfigError: The overlap has not ended.
        """
        if self._is_active():
            gc.collect()  # a model is part of cycles, and may be waiting for this
        if self._is_active():
            raise ConfigError(
                f"{type(optimizer).__name__} is overlapped already, and both would step it: remove() the "
                "earlier overlap and call step() for its last pass first, or give each model an optimizer of "
                "its own"
            )

    def _is_active(self) -> bool:
        if self._state is None:  # it has ended, or is still to begin
            return False
        return self._state.phase is not Phase.REMOVED or any(map(self._is_pending, self._optimizers))

    def remove(self) -> bool:
        """Restore ``optimizer.step()``, unless the call for a pass that has stepped is still to come.

        Returns:
            Whether it is still to come.
        """
        pending = any(map(self._is_pending, self._optimizers))
        if not pending:
            self.restore()
        return pending

    def restore(self) -> None:
        """Restore ``optimizer.step()``; the overlap has ended, or is about to."""
        state, self._state = self._state, None
        if state is not None and state.phase is Phase.REMOVED:
            state.gradients.stop()
        while self._replacements:
            self._replacements.pop().restore()
        self._pending.clear()

    # ---- a pass ----

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
        if any(comparison.differs() for comparison in unread):
            self._refuse_change(_SAMPLED, "the last backward() and its step()")

    # ---- a call of step() ----

    def _call(
        self, optimizer: torch.optim.Optimizer, call: inspect.BoundArguments, step_now: Callable[[], Any]
    ) -> Any:
        """Do what a call of ``optimizer.step()`` means; return the closure's loss or the step's result."""
        loss, closure = None, call.arguments.get("closure")
        if callable(closure) and self._is_first_to_run_closure(optimizer):
            loss = self._run(closure)
            closure, call.arguments["closure"] = None, lambda: loss
        state, engine = self._state, self._stepping_engine()  # the closure may have made them
        if state is None:
            return step_now()
        if engine is not None:
            engine.require_outside_pass()
        if self._is_pending(optimizer):
            self._settle(state, optimizer, {**call.arguments, "closure": closure})
            return loss
        if self._pending:
            self._forget_pending(state)
        if engine is None:
            self.restore()
        elif engine.release is not None and state.gradients.none_since_step:
            _require_gradients(optimizer)
        return step_now()  # after pause() or no_sync(), or once more

    def _stepping_engine(self) -> Engine | None:
        """Return the engine, or ``None`` if it was removed, as it is when the model is gone."""
        removed = self._state is None or self._state.phase is Phase.REMOVED
        return None if removed else self._engine()

    def _guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the step of a backward pass would be repeated."""
        if self._is_pending(optimizer):
            raise ConfigError(
                f"the last backward pass has stepped {type(optimizer).__name__}, and its class's step() was "
                "called, which would step again: call optimizer.step(), and look it up after "
                "overlap_optimizer, which replaces it"
            )

    def _is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last pass has stepped an optimizer whose ``step()`` was not called since."""
        return optimizer in self._pending and self._state is not None and self._state.awaits_call

    def _is_first_to_run_closure(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a closure runs before any step, because its backward pass may be the one that steps."""
        state, engine = self._state, self._stepping_engine()
        if state is None:
            return bool(self._replacements)  # the closure may make it
        if engine is None or engine.paused:
            return False
        engine.require_outside_pass()
        self._refuse_other_order(optimizer)
        self._refuse_late_call(state)
        self._habit = _Habit.CALLS
        return True

    def _run(self, closure: Callable[[], Any]) -> Any:
        try:
            with torch.enable_grad():
                return closure()
        except RuntimeError:  # backward() raises its errors as RuntimeError
            if self._state is not None:
                self._state.raise_error()
            raise

    def _settle(
        self, state: OverlapState, optimizer: torch.optim.Optimizer, arguments: Mapping[str, Any]
    ) -> None:
        """Match a call of ``step()`` with the step of the last pass; raise if they do not fit."""
        _refuse_arguments(arguments)
        self._refuse_other_order(optimizer)
        try:
            self._refuse_late_call(state)
            self._require_same_inputs(optimizer)
        except ConfigError:
            if state.phase is Phase.REMOVED:  # raised once: no remove() can end it
                self._end_pending(state, optimizer)
            raise
        self._habit = _Habit.CALLS
        self._end_pending(state, optimizer)
        _run_step_hooks(optimizer)

    def _require_same_inputs(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if what the last pass has stepped with was changed after the step."""
        inputs = self._pending[optimizer]
        changed = inputs.find_change(optimizer)
        if changed is None and getattr(optimizer, "found_inf", None) is not None:
            changed = "a GradScaler called step()"
        if changed is not None:
            self._refuse_change(changed, "backward() and step()")
        self._compare_on_device(optimizer, inputs)

    def _end_pending(self, state: OverlapState, optimizer: torch.optim.Optimizer) -> None:
        del self._pending[optimizer]
        if not self._pending:
            state.settle()
            if state.phase is Phase.REMOVED:
                self.restore()

    def _forget_pending(self, state: OverlapState) -> None:
        """Forget a pass whose ``step()`` was left out before an ordinary one; raise if that is none."""
        try:
            self._refuse_left_out_call()
            if state.gradients.some_used_are_left():
                raise ConfigError(  # noqa: TRY301
                    "gradients have come between backward() and step(), after the step had been done: let "
                    "all of them come in no_sync() passes before the last one, or use the ordinary loop with "
                    "the same communication hook"
                )
        except ConfigError as error:
            failure = state.fail(error)
            if state.phase is Phase.REMOVED:  # raised once: no remove() can end it
                self.restore()
            raise failure from None
        self._pending.clear()
        self._habit = _Habit.LEAVES_OUT
        if state.phase is Phase.STEPPED:
            state.settle()

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
        if comparison.differs():
            self._refuse_change(_SAMPLED, "backward() and step()")

    def _refuse_change(self, changed: str, where: str) -> None:
        error = ConfigError(
            f"{changed} between {where}, after the step had been done: do it before backward(), pass clip= "
            "to overlap_optimizer, or use the ordinary loop with the same communication hook. For a norm "
            "that is only looked at: torch.nn.utils.get_total_norm"
        )
        raise error if self._state is None else self._state.fail(error)

    def _refuse_left_out_call(self) -> None:
        """Raise if the loop has called ``step()`` after earlier passes and not after the last one."""
        if self._pending and self._habit is _Habit.CALLS:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._pending)
            raise ConfigError(
                f"step() of {names} was not called after the last backward pass, which has stepped already: "
                "call it after every pass, let the closure of step(closure) call the only backward(), and "
                "call handle.pause() around a backward pass that is to step nothing, or not everything"
            )

    def _refuse_late_call(self, state: OverlapState) -> None:
        """Raise if passes stepped more than this call of ``step()`` stands for."""
        if self._habit is _Habit.LEAVES_OUT and self._pending:
            raise state.fail(
                ConfigError(
                    "several backward passes have stepped, and step() is called for the first time: each of "
                    "them was a step. Call step() after every backward pass or after none, and "
                    "handle.pause() around a backward pass that is to step nothing"
                )
            )

    def _refuse_other_order(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer with common parameters has stepped before, and is called later."""
        for earlier in self._optimizers[: self._optimizers.index(optimizer)]:
            if earlier not in self._pending:
                continue
            if not set(parameters_of(optimizer)).isdisjoint(parameters_of(earlier)):
                raise ConfigError(
                    f"{type(optimizer).__name__} and {type(earlier).__name__} have parameters in common, and "
                    "step in the order in which they were given to overlap_optimizer: call step() in it too"
                )


_SAMPLED = "gradients or parameters were changed (clipped, unscaled, ...)"


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise if ``step()`` was given anything besides its optimizer, after the step had been done."""
    given = [
        name
        for name, value in list(arguments.items())[1:]
        if value is not None and not (isinstance(value, (tuple, dict)) and not value)
    ]
    if given:
        raise ConfigError(f"the parameters are stepped already: {', '.join(given)} would come too late")


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
