"""Clip averaged gradients before a step inside ``backward()`` uses them."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import torch


class ClipPolicy(abc.ABC):
    """How to limit averaged gradients before a step uses them: value by value, or bucket by bucket."""

    @abc.abstractmethod
    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Limit the gradients of one bucket's parameters."""

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}


@dataclass(frozen=True)
class ByValue(ClipPolicy):
    """Clamp every value into ``[-max_value, max_value]``: exactly ``torch.nn.utils.clip_grad_value_``.

    Args:
        max_value: The limit, positive.
    """

    max_value: float

    def __post_init__(self) -> None:
        if not self.max_value > 0:
            raise ValueError(f"max_value must be positive, got {self.max_value}")

    def terms(self) -> dict[str, object]:
        """Return the limit."""
        return {"max_value": self.max_value}

    def clip(self, parameters: Sequence[torch.Tensor]) -> None:
        """Clamp in place."""
        if any(parameter.grad is not None for parameter in parameters):  # torch needs at least one
            torch.nn.utils.clip_grad_value_(parameters, self.max_value)
