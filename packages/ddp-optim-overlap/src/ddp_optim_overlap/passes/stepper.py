"""What steps parameters for an engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from ddp_optim_overlap.passes.gradient_watch import GradientWatch


class Stepper:
    """Steps parameters for an engine.

    Attributes:
        norm: The norm of the last step's gradients before clipping, if it was computed on the way.
    """

    norm: torch.Tensor | None = None

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}

    def begin(self) -> None:
        """Prepare for a pass that hands over its first bucket, before any communication. May raise."""

    def require_averaged(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if a parameter would have to be stepped that DDP does not average.

        Args:
            averaged: The parameters that have been in a bucket.
        """

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Change the ``.grad`` of a whole bucket, to clip it, say."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped.

        Args:
            gradients: Learns which gradients were used.
        """

    def remove(self) -> bool:
        """End the overlap; return whether the loop's ``step()`` for the last pass is still to come."""
        return False
