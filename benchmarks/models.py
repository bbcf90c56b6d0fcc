"""Models that several benchmarks train."""

from __future__ import annotations

import torch
from torch import nn


class Transformer(nn.Module):
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
