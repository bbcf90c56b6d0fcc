"""Memory that is used again for every bucket: fresh memory would be paged in again, slower than the wire."""

from __future__ import annotations

import math

import torch

__all__ = ["Scratch"]

_ALIGNMENT = 64


class Scratch:
    """Hands out pieces of one tensor of bytes, until it starts over.

    It learns how much is needed: what does not fit is allocated on its own, and the tensor is as large as
    was needed the next time it starts over.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    def start_over(self) -> None:
        """Forget what was handed out. Nobody may use it any more."""
        if self._taken > self._memory.numel():
            device = self._memory.device
            self._memory = torch.empty(0, dtype=torch.uint8, device=device)  # before the new one is taken
            self._memory = torch.empty(self._taken, dtype=torch.uint8, device=device)
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return room for ``count`` elements, uninitialized."""
        size = count * dtype.itemsize
        start, self._taken = self._taken, self._taken + math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        if self._taken <= self._memory.numel():
            return self._memory[start : start + size].view(dtype)
        return torch.empty(count, dtype=dtype, device=self._memory.device)
