"""The user's optimizers, as an engine steps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.engine import Engine
from ddp_optim_overlap.loop_checks import ForeignParameters, require_no_pre_hooks
from ddp_optim_overlap.optimizer_hooks import mark_stepped
from ddp_optim_overlap.partial_steps import PartialSteps, is_torchs_own
from ddp_optim_overlap.step_calls import StepCalls
from ddp_optim_overlap.step_inputs import Options, StepInputs, options_of
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.tried import Tried
from dist_utils.torch_compat import tensor_version

__all__ = ["OverlappedOptimizers"]


class OverlappedOptimizers(Stepper):
    """Steps optimizers for an engine; :class:`StepCalls` handles the loop's own ``optimizer.step()``.

    Args:
        optimizers: The user's optimizers.
        tried: The findings about each, unless ``whole``.
        model: The parameters whose gradients count for clipping.
        whole: Step everything at once, by ``optimizer.step()`` itself.
        clip: Limits gradients before a step.
        scaler: Unscales gradients before they are clipped.
        only: The parameters to step; ``None`` for all parameters of the optimizers.

    Attributes:
        parts: Steps some of the optimizers' parameters.
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
        self.parts = PartialSteps(
            optimizers, [one.parallel for one in tried], [one.checks.around for one in tried]
        )
        self._calls = StepCalls(optimizers, self.parts, whole=whole)
        self._foreign = ForeignParameters(self.parts)
        self._reads_gradients_only = all(map(is_torchs_own, optimizers))
        self._read: dict[torch.optim.Optimizer, tuple[Options, Mapping[torch.Tensor, Any]]] = {}

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks; option values may differ, as in DDP."""
        kinds = [(type(one).__qualname__, len(one.param_groups)) for one in self._optimizers]
        clip = (
            repr(self._clip) if hasattr(self._clip, "__dataclass_fields__") else type(self._clip).__qualname__
        )
        return {"optimizers and their groups": kinds, "clip": clip, "scaler": self._scaler is not None}

    def attach(self, engine: Engine) -> None:
        """Serve as the stepper of this engine."""
        self._foreign = ForeignParameters(self.parts)
        self._calls.attach(engine)

    def replace_steps(self) -> None:
        """Replace ``optimizer.step()``; done before an engine is made, for the sake of closures."""
        self._calls.replace()

    def remove(self) -> None:
        """Restore ``optimizer.step()``; a step that a pass has already done is not repeated."""
        self._calls.remove()

    def require_unchanged(self) -> None:
        """See :meth:`StepCalls.require_unchanged`."""
        self._calls.require_unchanged()

    @property
    def norm(self) -> torch.Tensor | None:  # type: ignore[override]
        """The norm of the last step's gradients, before clipping."""
        return None if self._clip is None else self._clip.norm

    @property
    def begun(self) -> int:  # type: ignore[override]
        """How many optimizers had started their step in the last step of all."""
        return self._calls.begun

    def finish(self, engine: Engine) -> None:
        """Clean up after a backward pass that has stepped."""
        if not self.whole:
            self.parts.finish()
        # A whole step may change options; partial steps read them when their gradients arrive.
        read = self._options_and_states() if self.whole else self._read
        self._read = {}  # so that a replaced state is freed
        stepped = {optimizer: StepInputs(optimizer, *read[optimizer]) for optimizer in self._optimizers}
        self._calls.finish(stepped)
        engine.gradients.take_as_used(
            [parameter for inputs in stepped.values() for parameter in inputs.parameters],
            [mark for inputs in stepped.values() for mark in inputs.marks],
        )
        for optimizer in self._optimizers:
            mark_stepped(optimizer)

    def begin(self, engine: Engine) -> None:
        """Prepare for a backward pass that hands over its first bucket."""
        self._calls.begin(engine)
        self._renew_trials()
        self._read = self._options_and_states()
        self.parts.begin()
        self._foreign.require_none(engine.averaged)
        if self._clip is not None:
            self._clip.begin()
        self.refuse_pre_hooks()

    def _options_and_states(self) -> dict[torch.optim.Optimizer, tuple[Options, Mapping[torch.Tensor, Any]]]:
        return {optimizer: (options_of(optimizer), optimizer.state) for optimizer in self._optimizers}

    def refuse_pre_hooks(self) -> None:
        """Raise if a step pre-hook would run too late.

        Raises:
            ConfigError: An optimizer that is stepped by buckets has one.
        """
        if not self.whole:
            require_no_pre_hooks(self._optimizers)

    def _renew_trials(self) -> None:
        """Raise, before any communication, if an optimizer can no longer be stepped by buckets."""
        for place, tried in enumerate(self._tried):
            tried.renew()
            self.parts.parallel[place] = tried.parallel

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip a bucket's gradients."""
        if self._clip is not None:
            self._clip.clip(parameters)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step parameters of a bucket; everything, if :attr:`whole`."""
        if self.whole:
            self._step_whole()
            return
        versions = self._gradient_versions(parameters)
        self.parts.step([one for one in parameters if self._only is None or one in self._only])
        self._calls.gradients_written |= self._gradient_versions(parameters) != versions

    def _gradient_versions(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return how often each gradient was written; empty for torch's own optimizers, which only read."""
        if self._reads_gradients_only:
            return []
        return [tensor_version(one.grad) for one in parameters if one.grad is not None]

    def _step_whole(self) -> None:
        with self._calls.inside_pass():
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
            self._calls.gradients_written |= self._gradient_versions(self._model) != versions
