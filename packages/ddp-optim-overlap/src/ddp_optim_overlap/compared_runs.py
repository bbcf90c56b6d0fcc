"""One optimizer stepped three times: all parameters together, one after the other, and in reverse order."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.optimizer_hooks import FUSED_CHECK
from ddp_optim_overlap.trial import Run, Trial, own_attributes, random_numbers_restored, shared_state

__all__ = ["ComparedRuns", "difference", "gradients_for"]

_OTHER_SCALE = 1e-5
"""Scale of every other gradient in a step, so that a limit between two scales is between two gradients."""
_LARGEST_HALF = 1e3
"""The largest scale for gradients in float16."""


class ComparedRuns:
    """Three copies of an optimizer inside a running trial.

    Attributes:
        together: The copy that steps all parameters at once.

    Args:
        trial: Makes the copies.
        raised: Whether learning rates are raised so that every step has a visible effect.
    """

    def __init__(self, trial: Trial, *, raised: bool = True) -> None:
        self._trial = trial
        self.together, self._apart, self._backwards = (trial.run(raised=raised) for _ in range(3))

    @property
    def all(self) -> tuple[Run, Run, Run]:
        """The copies."""
        return self.together, self._apart, self._backwards

    def step(self, scale: float, seed: int) -> str:
        """Step all three with gradients of this scale; return why steps must not be split, or ``""``."""
        name = type(self._trial.optimizer).__name__
        gradients = gradients_for(self.together.values.values(), scale, seed)
        with random_numbers_restored(self._trial.chosen, seed) as drawn:
            strangers = self.together.step(gradients)
            if drawn():
                return (
                    f"the step of {name} draws random numbers, which would be others in another order. Use "
                    "OverlapMode.AFTER_REDUCE, which steps all at once"
                )
        for run, direction in ((self._apart, 1), (self._backwards, -1)):
            with random_numbers_restored(self._trial.chosen, seed):
                strangers |= run.step_apart(gradients, direction)
        if strangers:
            return f"the step of {name} writes parameters that are not in its groups: use the ordinary loop"
        found = difference(self.together, self._apart) or difference(self.together, self._backwards)
        if found:
            return (
                f"{name} does not step per parameter: {found} when parameters are stepped apart. "
                "Use OverlapMode.AFTER_REDUCE, which steps all at once"
            )
        return ""


def gradients_for(values: Iterable[torch.Tensor], scale: float, seed: int) -> list[torch.Tensor]:
    """Return gradients of a scale, every other one much smaller."""
    generator = torch.Generator("cpu").manual_seed(seed)
    gradients = []
    for place, value in enumerate(values):
        dtype = torch.complex64 if value.is_complex() else torch.float32
        gradient = torch.randn(value.shape, generator=generator, dtype=dtype, device="cpu")
        gradient *= min(scale, _LARGEST_HALF) if value.dtype == torch.float16 else scale
        if (place + seed) % 2:
            gradient *= _OTHER_SCALE
        # With the parameter's strides, because the order of a sum depends on them.
        gradients.append(torch.empty_like(value).copy_(gradient))
    return gradients


def difference(together: Run, apart: Run) -> str:
    """Describe the first difference; options and attributes first, because they may cause the rest."""
    one, other = together.optimizer, apart.optimizer
    return _difference_of_optimizers(one, other) or _difference_of_parameters(together, apart)


def _difference_of_optimizers(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> str:
    for one_group, other_group in zip(one.param_groups, other.param_groups, strict=True):
        for key in {*one_group, *other_group} - {"params"}:
            if not equal(one_group.get(key), other_group.get(key)):
                return f"its option {key!r}, which the step changes, differs"
    one_own, other_own = own_attributes(one), own_attributes(other)
    for key in {*one_own, *other_own} - {FUSED_CHECK}:
        if not equal(one_own.get(key), other_own.get(key)):
            return f"its attribute {key!r}, which the step changes, differs"
    if not equal(shared_state(one), shared_state(other)):
        return "its state, where it belongs to no parameter, differs"
    return ""


def _difference_of_parameters(together: Run, apart: Run) -> str:
    one, other = together.optimizer, apart.optimizer
    for parameter, value in together.values.items():
        if not equal(value, apart.values[parameter]):
            return "other values come out"
        if not equal(dict(one.state[parameter]), dict(other.state[parameter])):
            return "its state differs"
        if not equal(together.attributes[parameter], apart.attributes[parameter]):
            return "what it keeps in attributes of parameters differs"
    return ""
