"""The trained models: two transformers on text, a convolutional network and a wide perceptron on digits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from bench_quant_convergence import Digits, Language, LanguageModel, Task
from torch import nn


class SmallTransformer(LanguageModel):
    """7.3 million parameters."""

    WIDTH, HEADS, LAYERS = 384, 6, 4


class LargeTransformer(LanguageModel):
    """57 million parameters."""

    WIDTH, HEADS, LAYERS = 768, 12, 8


class SmallText(Language):
    """Text for the small transformer."""

    batch = 8

    def model(self) -> nn.Module:
        """Return a transformer of 7.3 million parameters."""
        return SmallTransformer()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, with a rate for this width."""
        return torch.optim.AdamW(parameters, lr=5e-4, fused=True)


class LargeText(SmallText):
    """Text for the large transformer."""

    batch = 4

    def model(self) -> nn.Module:
        """Return a transformer of 57 million parameters."""
        return LargeTransformer()


class ConvolvedDigits(Digits):
    """Images for a network with much computation and few parameters."""

    batch = 64

    def model(self) -> nn.Module:
        """Return a convolutional network of 1.5 million parameters."""
        return nn.Sequential(
            *_convolution(1, 64),
            *_convolution(64, 128),
            nn.MaxPool2d(2),
            *_convolution(128, 256),
            *_convolution(256, 256),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256 * 4, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )


def _convolution(before: int, after: int) -> list[nn.Module]:
    # No batch norm, because DDP would send its statistics without the hook.
    return [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]


class WideDigits(Digits):
    """Images for a network with many parameters and little computation."""

    batch = 8
    WIDTH, HIDDEN = 1536, 8

    def model(self) -> nn.Module:
        """Return a perceptron of 19 million parameters."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, self.WIDTH), nn.ReLU()]
        for _ in range(self.HIDDEN):
            layers += [nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(self.WIDTH, 10))

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW, with a rate for this width."""
        return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Model:
    """A model of the table.

    Args:
        task: Makes the model, its data and its optimizer.
        parameters: The number of parameters in millions, for estimates of memory and time.
        bucket_mb: DDP's ``bucket_cap_mb``: five to ten buckets.
        step_seconds: A rough estimate of one step's computation, with one core per rank.
        views: DDP's ``gradient_as_bucket_view``, which saves memory.
    """

    task: Callable[[], Task]
    parameters: float
    bucket_mb: float
    step_seconds: float
    views: bool = False

    @property
    def plain_bytes(self) -> float:
        """The size of its gradients in fp32."""
        return 4e6 * self.parameters

    @property
    def bytes_of_a_side(self) -> float:
        """One rank's memory to train it once: values, gradients, AdamW's states, buckets, residuals."""
        return self.plain_bytes * (6 if self.views else 7)


MODELS = {
    "7M": Model(SmallText, 7.3, 5, 0.2),
    "MLP": Model(WideDigits, 19.0, 8, 0.1),
    "conv": Model(ConvolvedDigits, 1.5, 1, 0.1),
    "60M": Model(LargeText, 57.0, 20, 1.0, views=True),
}
