"""The user's optimizers while their steps are overlapped: what steps them, and what step() means then."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.engine import Engine
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.fitness import require_unused_loss
from ddp_optim_overlap.partial_steps import PartialSteps, is_torchs_own, parameters_of
from ddp_optim_overlap.replaced_step import ReplacedStep, has_pre_hooks
from ddp_optim_overlap.step_inputs import Options, StepInputs, options_of
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.tried import Tried
from dist_utils.torch_compat import mark_stepped, step_post_hooks, step_pre_hooks, tensor_version

__all__ = ["OverlappedOptimizers"]


class OverlappedOptimizers(Stepper):
    """Steps optimizers for an engine, and makes the loop's own ``optimizer.step()`` harmless.

    The first ``optimizer.step()`` after a backward pass that has stepped does not step. It checks that
    nobody has changed in vain what the step had read, raises errors with their type, and runs the
    optimizer's step hooks, unless these have run in the pass. A closure runs first; its backward pass may be
    the one that steps. Any other call is an ordinary step.

    Args:
        optimizers: The user's.
        tried: What is known of each, unless ``whole``.
        model: The parameters whose gradients count for clipping.
        whole: Step everything at once, by ``optimizer.step()`` itself.
        clip: Limits gradients before a step.
        scaler: Unscales them before that.
        only: Which parameters to step; ``None`` for all that the optimizers have.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        tried: Sequence[Tried] = (),
        *,
        model: Sequence[torch.Tensor],
        whole: bool,
        clip: ClipPolicy | None = None,
        scaler: torch.amp.grad_scaler.GradScaler | None = None,
        only: set[torch.Tensor] | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._model = model
        self.whole = whole
        self._clip = clip
        self._scaler = scaler
        self._only = only
        self._tried = tried
        self.changes_gradients = clip is not None or scaler is not None
        self._partial = PartialSteps(
            optimizers, [one.parallel for one in tried], [one.checks.around for one in tried]
        )
        self._engine: Callable[[], Engine | None] = lambda: None
        self._looked_at = (0, 0)
        self._not_averaged: list[torch.Tensor] = []
        self._stepping_now = False
        self._reads_gradients_only = all(map(is_torchs_own, optimizers))
        self._writes_gradients = False
        self.begun = 0
        self._stepped: dict[torch.optim.Optimizer, StepInputs] = {}
        self._options: dict[torch.optim.Optimizer, Options] = {}
        self._steps_called = False
        self._step_was_left_out = False
        self._replaced: list[ReplacedStep] = []
        self._loss_unused: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def terms(self) -> dict[str, object]:
        """Return what must be alike on all ranks; an option's value is the user's own affair, as in DDP."""
        kinds = [(type(one).__qualname__, len(one.param_groups)) for one in self._optimizers]
        clip = (
            repr(self._clip) if hasattr(self._clip, "__dataclass_fields__") else type(self._clip).__qualname__
        )
        return {"optimizers and their groups": kinds, "clip": clip, "scaler": self._scaler is not None}

    def attach(self, engine: Engine) -> None:
        """Be what this engine steps with."""
        self._engine = weakref.ref(engine)  # which has this: together they would be a cycle
        self._looked_at = (0, 0)
        self.replace_steps()

    def replace_steps(self) -> None:
        """Begin to take part in ``optimizer.step()``; before an engine is made, for the sake of closures."""
        self._replaced = [
            ReplacedStep(optimizer, self._before_closure, self._is_done, self._is_pending)
            for optimizer in self._optimizers
        ]

    def remove(self) -> None:
        """Leave ``optimizer.step()`` as it was; one that is done already stays done."""
        engine = self._engine()
        if not (self._stepped and engine is not None and engine.gradients.step_is_newest):
            self._leave()

    def _leave(self) -> None:
        while self._replaced:
            self._replaced.pop().restore()
        self._stepped.clear()
        engine = self._engine()
        if engine is not None and engine.removed:
            engine.gradients.stop()

    def owned(self) -> Collection[torch.Tensor]:
        """Return the parameters that are stepped."""
        return self._partial.owned

    @property
    def norm(self) -> torch.Tensor | None:  # type: ignore[override]
        """Of the last step's gradients, before clipping."""
        return None if self._clip is None else self._clip.norm

    def finish(self, engine: Engine) -> None:
        """A backward pass that has stepped is over."""
        if not self.whole:
            self._partial.finish()
        self._stepped = {
            # The step of all may change options, that of parts reads them when its gradients come.
            optimizer: StepInputs(
                optimizer, options_of(optimizer) if self.whole else self._options[optimizer]
            )
            for optimizer in self._optimizers
        }
        everything = list(self._stepped.values())
        engine.gradients.take_as_used(
            [parameter for inputs in everything for parameter in inputs.parameters],
            [mark for inputs in everything for mark in inputs.marks],
        )
        for optimizer in self._optimizers:
            mark_stepped(optimizer)

    def begin(self, engine: Engine) -> None:
        """A backward pass hands over its first bucket."""
        self._refuse_superseded(engine)
        self._refuse_left_out_step()
        self._renew_trials()
        self._options = {optimizer: options_of(optimizer) for optimizer in self._optimizers}
        self._partial.begin()
        self._refuse_foreign(engine)
        if self._clip is not None:
            self._clip.begin()
        self.refuse_pre_hooks()

    def _refuse_superseded(self, engine: Engine) -> None:
        """Raise if ``step()`` asks another overlap by now, which knows nothing of this pass."""
        if self._engine() is not engine or any(replaced.superseded for replaced in self._replaced):
            names = ", ".join(type(optimizer).__name__ for optimizer in self._optimizers)
            raise ConfigError(
                f"{names} is overlapped by something else since: its step() would step again what this "
                "backward pass steps. An optimizer takes part in one overlap: remove() this one first, or "
                "give each model an optimizer of its own"
            )

    def _refuse_left_out_step(self) -> None:
        """Raise if the loop calls ``step()``, and has not for the last pass: without it nothing is undone."""
        if self._stepped and self._steps_called:
            names = ", ".join(type(optimizer).__name__ for optimizer in self._stepped)
            raise ConfigError(
                f"the last backward pass has stepped {names}, and step() of it was not called, as it was "
                "before: without step() in the loop a pass steps all the same. Call handle.pause() around a "
                "backward pass that is to step nothing, or not everything"
            )
        for optimizer in () if self.whole else self._stepped:
            if step_post_hooks(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step post-hook, which runs in step(), and step() was "
                    "not called for the last backward pass: call it after each one, or take the hook away"
                )
        self._step_was_left_out |= bool(self._stepped)

    def _renew_trials(self) -> None:
        """Raise if an optimizer has got what it cannot step by buckets, before anything communicates."""
        for place, tried in enumerate(self._tried):
            tried.renew()
            self._partial.parallel[place] = tried.parallel

    def _refuse_foreign(self, engine: Engine) -> None:
        """Raise if the optimizers have got parameters that DDP does not average."""
        if not engine.averaged:  # in the first pass nobody knows
            return
        looked_at = self._partial.renewals, len(engine.averaged)
        if looked_at != self._looked_at:
            self._looked_at = looked_at
            self._not_averaged = [one for one in self._partial.parameters if one not in engine.averaged]
        for parameter in self._not_averaged:
            if parameter.requires_grad or parameter.grad is not None:
                raise ConfigError(
                    f"an optimizer has a parameter, of shape {tuple(parameter.shape)}, that this DDP model "
                    "does not average, as it is not the model's or was frozen when DDP was made: it would "
                    "never be stepped. Give it an optimizer of its own, or make the DDP model anew"
                )

    def refuse_pre_hooks(self) -> None:
        """Raise if a step pre-hook would run too late.

        Raises:
            ConfigError: An optimizer that is stepped by buckets has one.
        """
        for optimizer in () if self.whole else self._optimizers:
            if has_pre_hooks(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step pre-hook, which may change gradients and would "
                    "run after they were used: use OverlapMode.AFTER_REDUCE"
                )

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Limit a bucket's gradients."""
        if self._clip is not None:
            self._clip.clip(parameters)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step parameters of a bucket; everything, if :attr:`whole`."""
        if self.whole:
            self._step_whole()
            return
        versions = self._gradient_versions(parameters)
        self._partial.step([one for one in parameters if self._only is None or one in self._only])
        self._writes_gradients |= self._gradient_versions(parameters) != versions

    def _gradient_versions(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return how often the gradients were written, unless torch's own steps leave them as they are."""
        if self._reads_gradients_only:
            return []
        return [tensor_version(one.grad) for one in parameters if one.grad is not None]

    def _step_whole(self) -> None:
        self._stepping_now = True
        self.begun = 0
        try:
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    self._scaler.unscale_(optimizer)
            if self._clip is not None:
                self._clip.clip(self._model)
            versions = self._gradient_versions(self._model)
            for optimizer in self._optimizers:
                if self._scaler is not None:
                    self._scaler.step(optimizer)  # calls optimizer.step(), or skips it
                else:
                    optimizer.step()
            self._writes_gradients |= self._gradient_versions(self._model) != versions
        finally:
            self._stepping_now = False

    def _before_closure(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[object] | None:
        """Return what to be in while a closure runs, which may step; none if the step itself is to run it."""
        engine = self._engine()
        if self._stepping_now or not self._replaced:
            return None
        if engine is None:  # it may be made while the closure runs
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
        self._steps_called = True  # one pass may step in a closure
        return _closure_running(engine, has_stepped=has_stepped)

    def _require_unused_loss(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if a closure's loss would change the step, which is done without it by then."""
        if self.whole or is_torchs_own(optimizer) or optimizer in self._loss_unused:
            return
        place = next(place for place, own in enumerate(self._optimizers) if own is optimizer)
        require_unused_loss(optimizer, self._partial.parallel[place])
        self._loss_unused.add(optimizer)

    def _has_stepped(self, engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
        return engine.gradients.step_is_newest and optimizer in self._stepped

    def _is_pending(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last pass has stepped an optimizer whose ``step()`` was not called since."""
        engine = self._engine()
        if engine is None or not self._replaced or self._stepping_now:
            return False
        return self._has_stepped(engine, optimizer)

    def _is_done(self, optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> bool:
        """Whether this call of ``optimizer.step()`` finds nothing left to do; raises what is wrong.

        Args:
            optimizer: One of these.
            given: The arguments of the call that say something, by name, without the closure, which has run.
        """
        if self._stepping_now:
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
            self._refuse_without_gradients(engine, optimizer)
            return False  # an ordinary step, after pause() or no_sync() or once more
        if given:
            raise ConfigError(
                f"the parameters are stepped already: {', '.join(given)} for step() would come too late"
            )
        self._refuse_late_calls(optimizer)
        self._refuse_late_changes(optimizer)
        self._steps_called = True
        del self._stepped[optimizer]
        if not self._stepped:
            engine.gradients.step_is_newest = False
            engine.contents.clear()
            if engine.removed:
                self._leave()
        if not self.whole and (step_pre_hooks(optimizer) or step_post_hooks(optimizer)):  # else they have run
            _run_step_hooks(optimizer)
        return True

    def _refuse_without_gradients(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an ordinary step would find no gradients because they were taken away."""
        if engine.release is None or not engine.gradients.none_since_pass:
            return
        if all(parameter.grad is None for parameter in parameters_of(optimizer)):
            raise ConfigError(
                "step() was called once more, and with release_gradients=True the gradients are gone: leave "
                "that out to step with them again"
            )

    def _refuse_late_calls(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if more was stepped than this call of ``step()`` stands for, or in another order."""
        if self._step_was_left_out:
            raise ConfigError(
                "several backward passes have stepped, and step() is called for the first time: each of them "
                "was a step. Call step() after every backward pass or after none, and handle.pause() around "
                "a backward pass that is to step nothing"
            )
        for earlier in self._optimizers[: self._optimizers.index(optimizer)]:
            if earlier in self._stepped and self._partial.share_parameters(earlier, optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} and {type(earlier).__name__} have parameters in common, and "
                    "step in the order in which they were given to overlap_optimizer: call step() in it too"
                )

    def _refuse_late_changes(self, optimizer: torch.optim.Optimizer) -> None:
        engine = self._engine()
        contents = None if engine is None or self._writes_gradients else engine.contents
        changed = self._stepped[optimizer].changed(optimizer, contents)
        if changed is None and getattr(optimizer, "found_inf", None) is not None:
            changed = "a GradScaler called step()"
        if changed is not None:
            raise ConfigError(
                f"{changed} between backward() and step(), after the step had been done: do it before "
                "backward() or after step(), or give clip= or scaler= to overlap_optimizer instead. A norm "
                "that is only looked at: torch.nn.utils.get_total_norm, or the report of handle.wait()"
            )


@contextlib.contextmanager
def _closure_running(engine: Engine, *, has_stepped: bool) -> Iterator[None]:
    with engine.refusing_passes() if has_stepped else contextlib.nullcontext():
        try:
            yield
        except RuntimeError:  # as backward() raises what goes wrong in it
            engine.raise_error()
            raise


@torch.optim.Optimizer.profile_hook_step
def _run_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Be a step that does nothing, with the hooks of one."""
