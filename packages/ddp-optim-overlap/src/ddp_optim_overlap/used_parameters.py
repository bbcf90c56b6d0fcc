"""Find out which parameters of a bucket got a gradient on this rank, and whether to tell other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.gradient_watch import GradientWatch

__all__ = ["UsedParameters"]


class UsedParameters:
    """Finds out which parameters of a bucket got a gradient, if it matters.

    Args:
        gradients: Tracks the gradients.
        unused_possible: Returns whether parameters may be left out of a backward pass.
        always: Find out even if none may be left out.

    Attributes:
        told: Whether the ranks tell each other in this pass.
    """

    def __init__(
        self, gradients: GradientWatch, unused_possible: Callable[[], bool], *, always: bool
    ) -> None:
        self.told = False
        self._gradients = gradients
        self._unused_possible = unused_possible
        self._always = always

    def begin(self) -> None:
        """Begin a backward pass."""
        self.told = self._unused_possible()

    def of(self, parameters: Sequence[torch.Tensor]) -> list[bool] | None:
        """Return which of these got a gradient on this rank; ``None`` if it does not matter.

        Raises:
            ConfigError: A parameter would count as unused because it was not watched.
        """
        if self.told and not self._gradients.watches(parameters):
            raise ConfigError(
                "DDP averages a parameter that the model did not have when overlap_optimizer was called: "
                "remove() the overlap and make a new one"
            )
        if self.told or self._always:
            return [self._gradients.has_come(parameter) for parameter in parameters]
        return None
