"""The optimizers that an engine steps, some of their parameters at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.optimizers.admission import (
    is_reviewed,
    require_plain_options,
    require_step_per_parameter,
)
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps
from ddp_optim_overlap.passes.gradient_watch import GradientWatch


class ParameterwiseOptimizer(torch.optim.Optimizer):
    """Steps one parameter after another.

    Args:
        params: The parameters.
        step_one: Steps a parameter with its ``.grad``.
    """

    def __init__(self, params: Iterable[torch.Tensor], step_one: Callable[[torch.Tensor], object]) -> None:
        super().__init__([{"params": list(params)}], {})  # there may be none
        self._step_one = step_one

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all parameters."""
        del closure
        for parameter in self.param_groups[0]["params"]:
            self._step_one(parameter)


class Stepper:
    """Steps optimizers for an engine.

    Args:
        optimizers: Each steps per parameter.
        clip: Limits gradients before a step.
        only: The parameters to step; ``None`` for all parameters of the optimizers.
        sparse: Parameters of the model with sparse gradients, and their names: one may be added later.
        drops_gradients: Whether every ``.grad`` is ``None`` after a pass.

    Attributes:
        parts: Step some of their parameters.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        clip: ClipPolicy | None = None,
        only: set[torch.Tensor] | None = None,
        sparse: Mapping[torch.Tensor, str] | None = None,
        drops_gradients: bool = False,
    ) -> None:
        self.optimizers = optimizers
        self._clip, self._only, self._sparse = clip, only, sparse or {}
        self._drops_gradients = drops_gradients
        self.parts = [PartialSteps(one, reviewed=is_reviewed(one)) for one in optimizers]
        self._known_averaged = 0
        self._not_averaged: list[tuple[PartialSteps, torch.Tensor]] = []

    def attach(self, engine: Any) -> None:
        """Begin an overlap, whose passes this engine runs."""

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks; option values may differ, as in DDP."""
        kinds = [(type(one).__qualname__, len(one.param_groups)) for one in self.optimizers]
        limits = {} if self._clip is None else self._clip.terms()
        return {"optimizers and their groups": kinds, "clip": type(self._clip).__qualname__, **limits}

    def begin(self) -> None:
        """Prepare for a pass that hands over its first bucket, before any communication.

        Raises:
            OverlapError: Options or parameters have been given to an optimizer that it cannot step with.
        """
        changed = [one.begin() for one in self.parts]
        if any(changed):
            self._known_averaged = 0
            for one in self.optimizers:
                require_plain_options(one)
                if is_reviewed(one):
                    require_step_per_parameter(one, declared=False, sparse=self._sparse)

    def require_averaged(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if a parameter would have to be stepped that DDP does not average.

        Args:
            averaged: The parameters that have been in a bucket.

        Raises:
            ConfigError: One would.
        """
        if len(averaged) != self._known_averaged:
            self._known_averaged = len(averaged)
            self._not_averaged = [
                (part, one) for part in self.parts for one in part.parameters if one not in averaged
            ]
        for part, parameter in self._not_averaged:
            if parameter.requires_grad or parameter.grad is not None:
                number, position = part.places[id(parameter)][0]
                raise ConfigError(
                    f"parameter {position} in group {number} of {type(part.optimizer).__name__}, of shape "
                    f"{tuple(parameter.shape)}, is not one that this DDP model averages, as it is another "
                    "model's or was frozen when DDP was made: it would never be stepped. Give it an "
                    "optimizer of its own, which the loop steps, or make a new DDP model"
                )

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clip those of a whole bucket's gradients that the optimizers step with."""
        if self._clip is None:
            return
        stepped = [one for one in parameters if any(id(one) in part.places for part in self.parts)]
        if stepped:
            self._clip.clip(stepped)

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of some parameters that are to be stepped, with their ``.grad``."""
        only = self._only
        parameters = parameters if only is None else [one for one in parameters if one in only]
        for part in self.parts:
            part.step(parameters)

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped.

        Args:
            gradients: Learns which gradients were used.
        """
        for part in self.parts:
            part.finish()
        parameters = [one for part in self.parts for one in part.parameters]
        if self._drops_gradients:
            for one in parameters:
                one.grad = None
        gradients.mark_as_used(parameters)

    def remove(self, gradients: GradientWatch) -> None:
        """End the overlap.

        Args:
            gradients: Stopped, once nobody asks it any more.
        """
        gradients.stop()
