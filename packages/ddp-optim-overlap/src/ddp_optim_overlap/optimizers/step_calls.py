"""The loop's calls of ``optimizer.step()`` while backward passes step."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.optimizers.partial_steps import (
    mark_stepped,
    run_guards,
    step_post_hooks,
    step_pre_hooks,
)
from ddp_optim_overlap.optimizers.step_inputs import Comparison, StepInputs
from ddp_optim_overlap.optimizers.stepper import Stepper
from ddp_optim_overlap.passes.gradient_watch import GradientWatch, is_capturing

if TYPE_CHECKING:
    from ddp_optim_overlap.passes.engine import Engine


class _Habit(Enum):
    """What the loop does after a pass that has stepped."""

    UNKNOWN = "nothing was seen yet"
    CALLS = "it calls step()"
    LEAVES_OUT = "it does not call step()"


class LoopStepper(Stepper):
    """Steps optimizers of which the loop calls ``step()``, too, and makes these calls harmless.

    The first call after a backward pass that has stepped does not step. It checks that the inputs of the step
    were not changed afterwards, raises errors with their type, and runs the optimizer's step hooks. A closure
    runs first, once; its backward pass may be the one that steps. Any other call is an ordinary step.

    Args:
        optimizers: The user's optimizers.
        options: As for :class:`Stepper`.

    Raises:
        ConfigError: An optimizer has a step pre-hook.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], **options: Any) -> None:
        super().__init__(optimizers, **options)
        self._engine: Engine | None = None
        self._replacements: list[_Replacement] = []
        self._pending: dict[torch.optim.Optimizer, StepInputs] = {}
        """The optimizers that the last pass stepped and whose ``step()`` was not called since."""
        self._habit = _Habit.UNKNOWN
        self._compared: set[torch.optim.Optimizer] = set()
        self._unread: list[Comparison] = []
        """Comparisons on accelerators, whose answers are read late to avoid waiting."""
        self._require_no_pre_hooks()

    # ---- an overlap begins and ends ----

    def replace_steps(self) -> None:
        """Replace ``optimizer.step()``; done before an engine is made, for the sake of closures.

        Raises:
            ConfigError: An optimizer is overlapped already.
        """
        if self._replacements:
            return
        for optimizer in self.optimizers:
            # Also under a scheduler's wrapper, which has the attributes of what it wraps.
            earlier = getattr(vars(optimizer).get("step"), "stepper", None)
            if isinstance(earlier, LoopStepper):
                earlier.require_ended(optimizer)
                earlier.restore()
        self._replacements = [_Replacement(one, self) for one in self.optimizers]

    def attach(self, engine: Engine) -> None:
        """Begin an overlap; raises if an optimizer is overlapped already."""
        self.require_ended(self.optimizers[0])
        self.replace_steps()
        self._engine = engine

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
        engine = self._engine  # None: the overlap is still to begin, or has ended
        return engine is not None and (not engine.is_removed or self.expects_a_call())

    def remove(self, gradients: GradientWatch) -> None:
        """Restore ``optimizer.step()``, unless the call for a pass that has stepped is still to come.

        That call asks which gradients have come.
        """
        del gradients
        if self._habit is _Habit.CALLS:
            self._habit = _Habit.UNKNOWN  # a call that was left out no longer matters
        if not any(map(self._is_pending, self.optimizers)):
            self.restore()

    def restore(self) -> None:
        """End the overlap, with or without calls that are still to come."""
        engine, self._engine = self._engine, None
        if engine is not None:
            super().remove(engine.gradients)
        while self._replacements:
            self._replacements.pop().restore()
        self._pending.clear()

    # ---- a pass ----

    def begin(self) -> None:
        """Check the loop and the optimizers when a backward pass that will step begins.

        Raises:
            ConfigError: The loop does not call ``step()`` as it must.
        """
        self.require_unchanged()
        if error := self._irregular(_Habit.CALLS):
            raise error
        for optimizer in self._pending:
            if step_post_hooks(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step post-hook, which runs in step(), and step() was "
                    "not called for the last backward pass: call it after each one, or take the hook away"
                )
        if self._pending:
            self._habit = _Habit.LEAVES_OUT
        super().begin()
        for optimizer in self._pending:
            run_guards(optimizer)  # as step() of the last pass would have, which was left out
        self._require_no_pre_hooks()

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped, and expect the loop's calls."""
        super().finish(gradients)
        self._pending = {one: StepInputs(one, gradients.marks) for one in self.optimizers}
        for one in self.optimizers:
            mark_stepped(one)

    def require_unchanged(self) -> None:
        """Raise if an accelerator has found that a step's inputs were changed after the step.

        Raises:
            ConfigError: They were. It is raised again until the overlap is removed.
        """
        if is_capturing():
            return  # the next pass reads the answers
        unread, self._unread = self._unread, []
        if any(comparison.differs() for comparison in unread):
            self._refuse_change(_SAMPLED)

    def _require_no_pre_hooks(self) -> None:
        for optimizer in self.optimizers:
            if _has_pre_hook(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step pre-hook, which may change gradients and would "
                    "run after they were used: use the ordinary loop with the same communication hook"
                )

    # ---- a call of step() ----

    def call_step(
        self, optimizer: torch.optim.Optimizer, given: inspect.BoundArguments, step_now: Callable[[], Any]
    ) -> Any:
        """Do what a call of ``optimizer.step()`` means; return the closure's loss or the step's result.

        Args:
            optimizer: One of the optimizers.
            given: Its arguments.
            step_now: Does the ordinary step with them.
        """
        loss, closure = None, given.arguments.get("closure")
        if callable(closure) and self._closure_comes_first:
            if self._engine is not None:
                self._engine.require_outside_pass()
                self._refuse_late_call()
                self._habit = _Habit.CALLS
            with torch.enable_grad():
                loss = closure()
            closure, given.arguments["closure"] = None, lambda: loss
        engine = self._engine  # the closure may have made it
        if engine is None:
            return step_now()
        engine.require_outside_pass()
        if self._is_pending(optimizer):
            self._settle(engine, optimizer, {**given.arguments, "closure": closure})
            return loss
        if self._pending and not engine.gradients.none_since_step:
            self._forget_pending(engine)
        return step_now()  # after pause() or no_sync(), or once more

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise the first error, or raise if the step of a backward pass would be repeated."""
        if self._engine is not None:
            self._engine.raise_error()
        if self._is_pending(optimizer):
            raise ConfigError(
                f"the last backward pass has stepped {type(optimizer).__name__}, and its class's step() was "
                "called, which would step again: call optimizer.step(), and look it up after "
                "overlap_optimizer, which replaces it"
            )

    def expects_a_call(self) -> bool:
        """Return whether the loop may still call ``step()`` for the last pass that has stepped."""
        return self._habit is not _Habit.LEAVES_OUT and any(map(self._is_pending, self.optimizers))

    def _is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the next ``step()`` is for the last pass, and no gradient has come since that."""
        engine = self._engine
        if engine is None or optimizer not in self._pending:
            return False
        return engine.is_idle and engine.gradients.none_since_step

    @property
    def _closure_comes_first(self) -> bool:
        """Whether a closure runs before any step, because its backward pass may be the one that steps."""
        engine = self._engine
        if engine is None:
            return bool(self._replacements)  # the closure may make it
        return not (engine.paused or engine.is_removed)

    def _settle(self, engine: Engine, optimizer: torch.optim.Optimizer, arguments: Mapping[str, Any]) -> None:
        """Match a call of ``step()`` with the step of the last pass; raise if they do not fit."""
        removed = engine.is_removed  # then what was left out no longer matters
        _refuse_arguments(arguments)
        if not removed:
            self._refuse_late_call()
        self._require_same_inputs(optimizer)
        run_guards(optimizer)
        del self._pending[optimizer]
        if not removed:
            self._habit = _Habit.CALLS
        elif not self._pending:
            self.restore()
        if step_post_hooks(optimizer):  # calling none took two fifths of this call
            _run_step_hooks(optimizer)

    def _require_same_inputs(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if what the last pass has stepped with was changed after the step.

        A loop that clips gradients does so from its first step on, so the first comparison on an accelerator
        is waited for. Later calls let the device continue, and the next backward pass reads the answer.
        """
        inputs = self._pending[optimizer]
        changed = inputs.find_change(optimizer)
        if changed is None and getattr(optimizer, "found_inf", None) is not None:
            changed = "a GradScaler called step()"
        if changed is None and _has_pre_hook(optimizer):
            changed = "a step pre-hook was registered"
        if changed is None:
            comparison = inputs.compare_sample()
            if optimizer in self._compared and not comparison.is_known:
                self._unread.append(comparison)
            elif comparison.differs():
                changed = _SAMPLED
            self._compared.add(optimizer)
        if changed is not None:
            self._refuse_change(changed)

    def _forget_pending(self, engine: Engine) -> None:
        """Forget a pass whose ``step()`` was left out before an ordinary one; raise if that is none."""
        if engine.gradients.some_used_are_left():
            raise self._failure(
                ConfigError(
                    "gradients have come between backward() and step(), after the step had been done: let "
                    "all of them come in no_sync() passes before the last one, or use the ordinary loop with "
                    "the same communication hook"
                )
            )
        if error := self._irregular(_Habit.CALLS):
            raise self._failure(error)
        self._pending.clear()
        self._habit = _Habit.LEAVES_OUT
        if engine.is_removed:
            self.restore()

    def _irregular(self, habit: _Habit) -> ConfigError | None:
        """Return the error of a loop that calls ``step()`` after some passes only, if it had this habit."""
        if not self._pending or self._habit is not habit:
            return None
        names = ", ".join(type(optimizer).__name__ for optimizer in self._pending)
        return ConfigError(
            f"step() of {names} was not called after every backward pass, and each was a step: call it "
            "after every pass or after none, let the closure of step(closure) call the only backward(), and "
            "call handle.pause() around a backward pass that is to step nothing, or not everything"
        )

    def _refuse_late_call(self) -> None:
        """Raise if passes stepped more than this call of ``step()`` stands for."""
        if error := self._irregular(_Habit.LEAVES_OUT):
            raise self._failure(error)

    def _refuse_change(self, changed: str) -> None:
        raise self._failure(
            ConfigError(
                f"{changed} between backward() and step(), after the step had been done: do it before "
                "backward(), pass clip= to overlap_optimizer, or use the ordinary loop with the same "
                "communication hook. For a norm that is only looked at: torch.nn.utils.get_total_norm"
            )
        )

    def _failure(self, error: ConfigError) -> Exception:
        """Return the error to raise: it ends the overlap, unless an earlier one has, or it was removed."""
        return error if self._engine is None else self._engine.fail(error)


def _has_pre_hook(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook that may change gradients runs before a step: others say that they guard it."""
    return any(not hasattr(hook, "guards") for hook in step_pre_hooks(optimizer).values())


_SAMPLED = "gradients or parameters were changed (clipped, unscaled, ...)"


def _refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise if ``step()`` was given anything besides its optimizer, after the step had been done."""
    given = [name for name, value in list(arguments.items())[1:] if value is not None]
    if given:
        raise ConfigError(f"the parameters are stepped already: {', '.join(given)} would come too late")


@torch.optim.Optimizer.profile_hook_step
def _run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step hooks around an empty step."""


class _Replacement:
    """Replaces an optimizer's ``step`` on the instance, as schedulers do.

    A step pre-hook guards the ``step`` of the class, for callers that kept ``optimizer.step`` from before.

    Args:
        optimizer: Its ``step`` is replaced.
        stepper: Gets the calls.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, stepper: LoopStepper) -> None:
        self._optimizer = optimizer
        self._before = before = vars(optimizer).get("step")  # a wrapper that a scheduler has put there
        signature = inspect.signature(type(optimizer).step)

        # No compiler can trace its questions, and the step of a pass is not compiled either.
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def call_step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            given = signature.bind(self, *args, **kwargs)

            def step_now() -> Any:
                if before is not None:
                    return before(*given.args[1:], **given.kwargs)
                return type(self).step(*given.args, **given.kwargs)

            return stepper.call_step(self, given, step_now)

        @functools.wraps(before or type(optimizer).step)
        def step(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return call_step(self, *args, **kwargs)

        def guard(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            del args, kwargs
            stepper.guard(optimizer)

        step.stepper = stepper  # type: ignore[attr-defined]
        guard.guards = True  # type: ignore[attr-defined]
        self._step = vars(optimizer)["step"] = MethodType(step, optimizer)
        self._guard = optimizer.register_step_pre_hook(guard)

    def restore(self) -> None:
        """Restore the previous ``step``, unless a scheduler has replaced this one."""
        self._guard.remove()
        own = vars(self._optimizer)
        if own.get("step") is self._step:
            del own["step"]
            if self._before is not None:
                own["step"] = self._before
