"""What one overlapped step did."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StepReport"]


@dataclass(frozen=True)
class StepReport:
    """What one backward pass has stepped.

    Attributes:
        number: Which pass: 1 for the first that stepped, or was to step.
        buckets: How many gradient buckets were handed over.
        stepped: The indices of those whose parameters were stepped, in order.
        seconds: The time that the steps took, on this rank's host.
        seconds_hidden: The part of it in which gradients were still being computed or averaged. Zero on an
            accelerator, where the host does not know.
        norm: The norm of the averaged gradients before clipping, if the clip policy computes it.
    """

    number: int = 0
    buckets: int = 0
    stepped: tuple[int, ...] = ()
    seconds: float = 0.0
    seconds_hidden: float = 0.0
    norm: torch.Tensor | None = None

    def progress(self) -> str:
        """Say which buckets were stepped."""
        if not self.stepped:
            return f"step {self.number}: no parameter was stepped"
        return (
            f"step {self.number}: the parameters of bucket {', '.join(map(str, self.stepped))} were stepped, "
            "no others"
        )
