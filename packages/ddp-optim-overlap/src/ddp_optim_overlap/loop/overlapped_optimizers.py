"""The user's optimizers, as an engine steps them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.loop.step_calls import StepCalls, has_pre_hooks
from ddp_optim_overlap.loop.step_inputs import StepInputs
from ddp_optim_overlap.optimizers.admission import (
    is_reviewed,
    require_plain_options,
    require_step_per_parameter,
)
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps, mark_stepped
from ddp_optim_overlap.passes.backward_pass import Stepper
from ddp_optim_overlap.passes.engine import Engine
from ddp_optim_overlap.passes.gradient_watch import GradientWatch


class OverlappedOptimizers(Stepper):
    """Steps optimizers for an engine.

    Args:
        optimizers: The user's optimizers. Each steps per parameter.
        clip: Limits gradients before a step.
        only: The parameters to step; ``None`` for all parameters of the optimizers.
        sparse: Parameters of the model with sparse gradients, and their names: one may be added later.

    Attributes:
        parts: Step some of their parameters.
        calls: Handles the loop's own ``optimizer.step()``.

    Raises:
        ConfigError: An optimizer has a step pre-hook.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        clip: ClipPolicy | None = None,
        only: set[torch.Tensor] | None = None,
        sparse: Mapping[torch.Tensor, str] | None = None,
    ) -> None:
        self._optimizers = optimizers
        self._clip = clip
        self._only = only
        self._sparse = sparse or {}
        self.parts = [PartialSteps(one, reviewed=is_reviewed(one)) for one in optimizers]
        self.calls = StepCalls(optimizers)
        self._known_averaged = 0
        self._not_averaged: list[tuple[PartialSteps, torch.Tensor]] = []
        self._require_no_pre_hooks()

    def attach(self, engine: Engine) -> None:
        """Begin an overlap, whose passes this engine runs; raises if something belongs to another one."""
        self.calls.attach(engine)

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks; option values may differ, as in DDP."""
        kinds = [(type(one).__qualname__, len(one.param_groups)) for one in self._optimizers]
        limits = {} if self._clip is None else self._clip.terms()
        return {"optimizers and their groups": kinds, "clip": type(self._clip).__qualname__, **limits}

    def begin(self) -> None:
        """Check the loop and the optimizers before a backward pass that will step."""
        self.calls.begin()
        changed = [one.begin() for one in self.parts]
        if any(changed):
            self._known_averaged = 0
            for one in self._optimizers:
                require_plain_options(one)
                if is_reviewed(one):
                    require_step_per_parameter(one, declared=False, sparse=self._sparse)
        self._require_no_pre_hooks()

    def require_averaged(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if a parameter would have to be stepped that DDP does not average."""
        if len(averaged) != self._known_averaged:
            self._known_averaged = len(averaged)
            self._not_averaged = [
                (part, one) for part in self.parts for one in part.places if one not in averaged
            ]
        for part, parameter in self._not_averaged:
            if parameter.requires_grad or parameter.grad is not None:
                number, position = part.places[parameter][0]
                raise ConfigError(
                    f"parameter {position} in group {number} of {type(part.optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is not one that this DDP model averages, as it is another "
                    "model's or was frozen when DDP was made: it would never be stepped. Give it an "
                    "optimizer of its own, which the loop steps, or make a new DDP model"
                )

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip those of a bucket's gradients that the optimizers step with."""
        if self._clip is None:
            return
        stepped = [one for one in parameters if any(one in part.places for part in self.parts)]
        if stepped:
            self._clip.clip(stepped)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of a bucket's parameters that the optimizers have."""
        only = self._only
        parameters = parameters if only is None else [one for one in parameters if one in only]
        for part in self.parts:
            part.step(parameters)

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped."""
        for part in self.parts:
            part.finish()
        stepped = {one: StepInputs(one) for one in self._optimizers}
        for optimizer in stepped:
            mark_stepped(optimizer)
        self.calls.finish(stepped)
        gradients.mark_as_used(
            [parameter for inputs in stepped.values() for parameter in inputs.parameters],
            [mark for inputs in stepped.values() for mark in inputs.marks],
        )

    def remove(self, gradients: GradientWatch) -> None:
        """End the overlap. A ``step()`` that is still to come asks which gradients have come."""
        del gradients
        self.calls.remove()

    def _require_no_pre_hooks(self) -> None:
        for optimizer in self._optimizers:
            if has_pre_hooks(optimizer):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step pre-hook, which may change gradients and would "
                    "run after they were used: use the ordinary loop with the same communication hook"
                )
