"""The interface through which an engine steps optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddp_optim_overlap.engine import Engine

__all__ = ["Stepper"]


class Stepper:
    """Steps parameters for an engine.

    Attributes:
        whole: Whether :meth:`step` is called once, without parameters, after DDP has written all averages
            into ``.grad``; otherwise it is called for every bucket.
        norm: The norm that :meth:`step` has computed on the way.
        begun: If ``whole``, how many optimizers have started their step, in their order.
        changes_gradients: If ``whole``, whether :meth:`step` scales gradients before using them.
    """

    whole = False
    changes_gradients = False
    norm: torch.Tensor | None = None
    begun = 1

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}

    def begin(self, engine: Engine) -> None:
        """Prepare for a pass that hands over its first bucket, before any communication. May raise."""

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Unless :attr:`whole`, change the ``.grad`` of a whole bucket, to clip it, say."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, engine: Engine) -> None:
        """Clean up after a backward pass that has stepped."""
