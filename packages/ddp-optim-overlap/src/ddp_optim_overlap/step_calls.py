"""The loop's calls of ``optimizer.step()`` while backward passes step."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddp_optim_overlap.engine import Engine
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.fitness import require_unused_loss
from ddp_optim_overlap.loop_checks import (
    UnreadComparisons,
    require_calls,
    require_gradients,
    require_no_post_hooks,
    require_one_overlap,
    require_unchanged,
)
from ddp_optim_overlap.optimizer_hooks import step_post_hooks, step_pre_hooks
from ddp_optim_overlap.partial_steps import PartialSteps, is_torchs_own
from ddp_optim_overlap.replaced_step import ReplacedStep
from ddp_optim_overlap.step_inputs import StepInputs

__all__ = ["StepCalls"]


class StepCalls:
    """Makes the loop's calls of ``optimizer.step()`` harmless after a backward pass that has stepped.

    The first call does not step. It checks that the inputs of the step were not changed afterwards, raises
    errors with their type, and runs the optimizer's step hooks, unless these have run in the pass. A closure
    runs first; its backward pass may be the one that steps. Any other call is an ordinary step.

    Args:
        optimizers: The user's optimizers.
        parts: Their steps by buckets.
        whole: Whether they are stepped by ``optimizer.step()`` itself.

    Attributes:
        begun: The number of calls in the last :meth:`inside_pass`.
        gradients_written: Whether steps write gradients; then their old contents do not tell of changes.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], parts: PartialSteps, *, whole: bool
    ) -> None:
        self._optimizers = optimizers
        self._parts = parts
        self._whole = whole
        self.begun = 0
        self.gradients_written = False
        self._engine: Callable[[], Engine | None] = lambda: None
        self._replaced: list[ReplacedStep] = []
        self._stepped: dict[torch.optim.Optimizer, StepInputs] = {}
        """The optimizers that the last pass stepped and whose ``step()`` was not called since."""
        self._unread = UnreadComparisons()
        self._inside_pass = False
        self._called = False
        """Whether the loop has ever called ``step()`` for a pass."""
        self._left_out = False
        """Whether the loop has ever left it out."""
        self._closure_of: Engine | None = None
        """The engine whose last pass has done the step of the running closure: another would step twice."""
        self._loss_unused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def attach(self, engine: Engine) -> None:
        """Follow the passes of this engine."""
        self._engine = weakref.ref(engine)  # the engine refers to this object: a cycle otherwise
        self.replace()

    def replace(self) -> None:
        """Replace ``optimizer.step()``; done before an engine is made, for the sake of closures."""
        self._replaced = [
            ReplacedStep(optimizer, self._before_closure, self._is_done, self._is_pending)
            for optimizer in self._optimizers
        ]

    def remove(self) -> None:
        """Restore ``optimizer.step()``; a step that a pass has already done is not repeated."""
        engine = self._engine()
        if not (self._stepped and engine is not None and engine.gradients.step_is_newest):
            self._leave()

    def begin(self, engine: Engine) -> None:
        """Check the loop when a backward pass that will step begins.

        Raises:
            ConfigError: The loop does not call ``step()`` as it must.
        """
        if self._closure_of is engine:
            raise ConfigError(
                "backward() has stepped before step(closure), and the closure's backward() would step again: "
                "let the closure call the only backward(), or call handle.pause() around the other one"
            )
        superseded = self._engine() is not engine or any(one.superseded for one in self._replaced)
        require_one_overlap(self._optimizers, superseded=superseded)
        self._unread.require_none()
        if self._called:
            require_calls(self._stepped)
        if not self._whole:
            require_no_post_hooks(self._stepped)
        self._left_out |= bool(self._stepped)

    def finish(self, stepped: dict[torch.optim.Optimizer, StepInputs]) -> None:
        """Record the optimizers that a backward pass has stepped."""
        self._stepped = stepped

    @contextlib.contextmanager
    def inside_pass(self) -> Iterator[None]:
        """Let the backward pass itself call ``optimizer.step()``, and count the calls."""
        self._inside_pass = True
        self.begun = 0
        try:
            yield
        finally:
            self._inside_pass = False

    def require_unchanged(self) -> None:
        """Raise if an accelerator has found that a step's inputs were changed after the step.

        Raises:
            ConfigError: They were.
        """
        self._unread.require_none()

    def _leave(self) -> None:
        while self._replaced:
            self._replaced.pop().restore()
        self._stepped.clear()
        engine = self._engine()
        if engine is not None and engine.removed:
            engine.gradients.stop()

    def _before_closure(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object] | None:
        """Return a context for a closure, which may step; ``None`` if the ordinary step is to run it."""
        engine = self._engine()
        if self._inside_pass or not self._replaced:
            return None
        if engine is None:  # the closure may make it
            return contextlib.nullcontext()
        has_stepped = self._has_stepped(engine, optimizer)
        if engine.removed or engine.paused:
            if has_stepped:
                raise ConfigError("the parameters are stepped already: a closure would come too late")
            return None
        engine.raise_error()
        engine.require_complete()
        self._require_unused_loss(optimizer)
        self._refuse_late_calls(optimizer)
        self._called = True  # the closure's pass may step
        return self._closure_running(engine, has_stepped=has_stepped)

    @contextlib.contextmanager
    def _closure_running(self, engine: Engine, *, has_stepped: bool) -> Iterator[None]:
        if has_stepped:
            self._closure_of = engine
        try:
            yield
        except RuntimeError:  # backward() raises its errors as RuntimeError
            engine.raise_error()
            raise
        finally:
            if has_stepped:
                self._closure_of = None

    def _require_unused_loss(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if a closure's loss would change the step, because the pass steps without it."""
        if self._whole or is_torchs_own(optimizer) or optimizer in self._loss_unused:
            return
        place = next(place for place, own in enumerate(self._optimizers) if own is optimizer)
        require_unused_loss(optimizer, self._parts.parallel[place])
        self._loss_unused.add(optimizer)

    def _has_stepped(self, engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
        return engine.gradients.step_is_newest and optimizer in self._stepped

    def _is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last pass has stepped an optimizer whose ``step()`` was not called since."""
        engine = self._engine()
        if engine is None or not self._replaced or self._inside_pass:
            return False
        return self._has_stepped(engine, optimizer)

    def _is_done(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> bool:
        """Whether this call of ``optimizer.step()`` has nothing left to do; raises pending errors.

        Args:
            optimizer: One of the optimizers.
            given: The non-empty arguments of the call by name, without the closure, which has run.
        """
        if self._inside_pass:
            self.begun += 1
            return False
        engine = self._engine()
        if engine is None or not self._replaced:
            return False
        if not engine.removed:
            engine.raise_error()
            engine.require_complete()
        if not engine.gradients.step_is_newest and engine.removed:
            self._leave()
        if not self._has_stepped(engine, optimizer):
            if engine.release is not None and engine.gradients.none_since_pass:
                require_gradients(optimizer)
            return False  # an ordinary step, after pause() or no_sync() or once more
        if given:
            raise ConfigError(
                f"the parameters are stepped already: {', '.join(given)} for step() would come too late"
            )
        self._settle(engine, optimizer)
        return True

    def _settle(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Match a call of ``step()`` with the step of the last pass; raise if they do not fit."""
        self._refuse_late_calls(optimizer)
        contents = None if self.gradients_written else engine.contents
        require_unchanged(optimizer, self._stepped[optimizer], contents)
        self._unread.add(optimizer, self._stepped[optimizer])
        self._called = True
        del self._stepped[optimizer]
        if not self._stepped:
            engine.gradients.step_is_newest = False
            engine.contents.clear()
            if engine.removed:
                self._leave()
        hooked = step_pre_hooks(optimizer) or step_post_hooks(optimizer)
        if hooked and not self._whole:  # a whole step has run them in the pass
            _run_step_hooks(optimizer)

    def _refuse_late_calls(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if passes stepped more than this call of ``step()`` stands for, or in a different order."""
        if self._left_out:
            raise ConfigError(
                "several backward passes have stepped, and step() is called for the first time: each of them "
                "was a step. Call step() after every backward pass or after none, and handle.pause() around "
                "a backward pass that is to step nothing"
            )
        for earlier in self._optimizers[: self._optimizers.index(optimizer)]:
            if earlier in self._stepped and self._parts.share_parameters(earlier, optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} and {type(earlier).__name__} have parameters in common, and "
                    "step in the order in which they were given to overlap_optimizer: call step() in it too"
                )


@torch.optim.Optimizer.profile_hook_step
def _run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Run an optimizer's step hooks around an empty step."""
