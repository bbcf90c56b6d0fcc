"""What benchmarks train: models, their data and their optimizers."""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import nn


class Task(Protocol):
    """Data, a model for it, and how to train it."""

    batch: int
    """Examples per rank and step."""

    def model(self) -> nn.Module:
        """Return a new model, made with torch's global generator."""
        ...

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return the optimizer at its first learning rate."""
        ...

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the indices of training examples."""
        ...

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the loss of these training examples."""
        ...

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the ``"loss"``, and possibly more figures, on the held-out examples."""
        ...


CHARACTERS, CONTEXT = 128, 32


class LanguageModel(nn.Module):
    """Maps characters to scores of the next ones.

    Args:
        width: The embedding width; layers are four times as wide inside.
        heads: The number of attention heads.
        layers: The number of layers.
        context: The number of characters.
    """

    def __init__(self, width: int = 96, heads: int = 4, layers: int = 2, context: int = CONTEXT) -> None:
        super().__init__()
        self.context = context
        self.characters = nn.Embedding(CHARACTERS, width)
        self.places = nn.Parameter(0.02 * torch.randn(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores (N, context, CHARACTERS) for the character after each one of ``text``."""
        hidden = self.characters(text) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(self.context)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        scores: torch.Tensor = self.output(self.norm(hidden))
        return scores


def library_files() -> list[Path]:
    """Return the standard library's modules."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def read(files: Iterable[Path]) -> torch.Tensor:
    """Return the characters of files."""
    text = bytearray(b"".join(file.read_bytes() for file in files))
    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=CHARACTERS - 1)


def next_character_loss(
    model: nn.Module, text: torch.Tensor, starts: torch.Tensor, context: int = CONTEXT
) -> torch.Tensor:
    """Return the mean loss over all characters of windows of a text."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class Language:
    """The next character of the standard library's modules. Every tenth file is held out.

    Args:
        batch: Windows per rank and step.
        rate: AdamW's learning rate.
        held_out_windows: For the held-out loss.
        sizes: Of :class:`LanguageModel`.
    """

    def __init__(
        self, batch: int = 4, rate: float = 3e-3, held_out_windows: int = 1024, **sizes: int
    ) -> None:
        self.batch = batch
        self._rate, self._held_out_windows, self._sizes = rate, held_out_windows, sizes
        files = library_files()
        self._held_out = read(files[::10])
        self._text = read(file for index, file in enumerate(files) if index % 10)

    def model(self) -> nn.Module:
        """Return a transformer, by default of 251 648 parameters."""
        return LanguageModel(**self._sizes)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        # Fused: a loop over the parameters would take a fifth of the step.
        return torch.optim.AdamW(parameters, lr=self._rate, fused=True)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the starts of windows."""
        return torch.randint(len(self._text) - CONTEXT, (count,), generator=generator)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all characters of the windows."""
        return next_character_loss(model, self._text, chosen)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on windows spread over the held-out files."""
        last, count = len(self._held_out) - CONTEXT - 1, self._held_out_windows
        starts = torch.arange(count) * last // (count - 1)
        parts = [next_character_loss(model, self._held_out, some).item() for some in torch.split(starts, 64)]
        return {"loss": statistics.fmean(parts)}


class LanguageBySgd(Language):
    """The same, with another optimizer."""

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=self._rate, momentum=0.9)


class Digits:
    """Handwritten digits of 8 x 8 pixels: 1500 to train on, 297 held out."""

    batch = 8
    TRAINING = 1500

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # noqa: PLC0415 - the other task does not need it

        raw = load_digits()
        order = torch.randperm(len(raw.target), generator=torch.Generator().manual_seed(0))
        self._images = (torch.from_numpy(raw.images).float() / 16).unsqueeze(1)[order]
        self._labels = torch.from_numpy(raw.target)[order]

    def model(self) -> nn.Module:
        """Return a convolutional network of 151 306 parameters."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * 16, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return indices of training images."""
        return torch.randint(self.TRAINING, (count,), generator=generator)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the images."""
        return nn.functional.cross_entropy(model(self._images[chosen]), self._labels[chosen])

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and accuracy on all held-out images."""
        scores, labels = model(self._images[self.TRAINING :]), self._labels[self.TRAINING :]
        return {
            "loss": nn.functional.cross_entropy(scores, labels).item(),
            "accuracy": (scores.argmax(1) == labels).float().mean().item(),
        }


TASKS: dict[str, Callable[[], Task]] = {"language": Language, "digits": Digits}


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


_small_text = partial(Language, 8, 5e-4, width=384, heads=6, layers=4)
_small_text_by_sgd = partial(LanguageBySgd, 8, 0.1, width=384, heads=6, layers=4)
_large_text = partial(Language, 4, 5e-4, width=768, heads=12, layers=8)
MODELS = {
    "7M": Model(_small_text, 7.3, 5, 0.2),
    "MLP": Model(WideDigits, 19.0, 8, 0.1),
    "conv": Model(ConvolvedDigits, 1.5, 1, 0.1),
    "60M": Model(_large_text, 57.0, 20, 1.0, views=True),
    "7M by SGD": Model(_small_text_by_sgd, 7.3, 5, 0.2),
}


class Encoder(nn.Module):
    """An encoder over tokens.

    Args:
        tokens: The number of different tokens.
        width: The embedding width; layers are four times as wide inside.
        heads: The number of attention heads.
        layers: The number of layers.
    """

    def __init__(self, tokens: int, width: int, *, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, tokens)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a score for every token at every position."""
        scores: torch.Tensor = self.out(self.layers(self.tokens(x)))
        return scores
