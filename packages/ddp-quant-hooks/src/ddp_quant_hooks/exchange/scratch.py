"""Memory that is reused for every bucket: paging in fresh memory would be slower than the wire."""

from __future__ import annotations

import math

import torch

_ALIGNMENT = 64


class Scratch:
    """Hands out pieces of one tensor of bytes, until it starts over.

    It learns how much is needed: a piece that does not fit is allocated on its own, and the next start makes
    the tensor as large as was needed.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    def start_over(self) -> None:
        """Take back everything that was handed out. Nothing may use it any more."""
        if self._taken > self._memory.numel():
            device = self._memory.device
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)  # freed before the next line
            self._memory = torch.empty(self._taken, dtype=torch.uint8, device=device)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return uninitialized memory for ``count`` elements."""
        size = count * dtype.itemsize
        start, self._taken = self._taken, self._taken + math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        if self._taken <= self._memory.numel():
            return self._memory[start : start + size].view(dtype)
        return torch.empty(count, dtype=dtype, device=self._memory.device)
