"""The optimizers that an engine steps: those of an overlap, or one per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ddp_optim_overlap.engine import Engine

__all__ = ["Stepper"]


class Stepper:
    """What an engine steps with.

    Attributes:
        whole: Whether :meth:`step` is called once, without parameters, when DDP has written all averages
            into ``.grad``; else for every bucket.
        norm: The norm that :meth:`step` has computed on the way.
        begun: If ``whole``, the steps of how many optimizers have begun, in their order.
        changes_gradients: If ``whole``, whether :meth:`step` scales gradients before it uses them.
    """

    whole = False
    changes_gradients = False
    norm: torch.Tensor | None = None
    begun = 1

    def terms(self) -> dict[str, object]:
        """Return what must be identical on all ranks."""
        return {}

    def begin(self, engine: Engine) -> None:
        """A backward pass hands over its first bucket, before any communication. May raise."""

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Unless :attr:`whole`: do to the ``.grad`` of a bucket's parameters what needs all of them."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, engine: Engine) -> None:
        """A backward pass that has stepped is over."""
