"""What benchmarks train: models, their data and their optimizers."""

from __future__ import annotations

import statistics
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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


class LanguageModel(nn.Module):
    """Maps characters to scores of the next ones."""

    WIDTH, HEADS, LAYERS, CONTEXT, CHARACTERS = 96, 4, 2, 32, 128

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(self.CHARACTERS, self.WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(self.CONTEXT, self.WIDTH))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                self.WIDTH, self.HEADS, 4 * self.WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(self.LAYERS)
        )
        self.norm = nn.LayerNorm(self.WIDTH)
        self.output = nn.Linear(self.WIDTH, self.CHARACTERS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return scores (N, CONTEXT, CHARACTERS) for the character after each one of ``text``."""
        hidden = self.characters(text) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(self.CONTEXT)
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
    return torch.frombuffer(text, dtype=torch.uint8).clamp(max=LanguageModel.CHARACTERS - 1)


def next_character_loss(
    model: nn.Module, text: torch.Tensor, starts: torch.Tensor, context: int = LanguageModel.CONTEXT
) -> torch.Tensor:
    """Return the mean loss over all characters of windows of a text."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return nn.functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class Language:
    """The next character of the standard library's modules. Every tenth file is held out."""

    batch = 4
    HELD_OUT_WINDOWS = 1024

    def __init__(self) -> None:
        files = library_files()
        self._held_out = read(files[::10])
        self._text = read(file for index, file in enumerate(files) if index % 10)

    def model(self) -> nn.Module:
        """Return a transformer of 251 648 parameters."""
        return LanguageModel()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Return AdamW."""
        # Fused: a loop over the parameters would take a fifth of the step.
        return torch.optim.AdamW(parameters, lr=3e-3, fused=True)

    def draw(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return the starts of windows."""
        return torch.randint(len(self._text) - LanguageModel.CONTEXT, (count,), generator=generator)

    def loss(self, model: nn.Module, chosen: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over all characters of the windows."""
        return next_character_loss(model, self._text, chosen)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the loss on windows spread over the held-out files."""
        last = len(self._held_out) - LanguageModel.CONTEXT - 1
        starts = torch.arange(self.HELD_OUT_WINDOWS) * last // (self.HELD_OUT_WINDOWS - 1)
        parts = [next_character_loss(model, self._held_out, some).item() for some in torch.split(starts, 64)]
        return {"loss": statistics.fmean(parts)}


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
