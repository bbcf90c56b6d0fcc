"""Memory that is reused for every bucket: paging in fresh memory would be slower than the wire."""

from __future__ import annotations

import torch


class Scratch:
    """Hands out pieces of memory, the same ones in the same order whenever it starts over.

    A piece is as long as the most that was taken at its place so far.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[torch.Tensor] = []
        self._taken = 0

    def start_over(self) -> None:
        """Take back everything that was handed out. Nothing may use it any more."""
        self._taken = 0

    def take(self, count: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return uninitialized memory for ``count`` elements."""
        size, place = count * dtype.itemsize, self._taken
        self._taken += 1
        if place == len(self._pieces):
            self._pieces.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._pieces[place].numel() < size:
            self._pieces[place] = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._pieces[place][:size].view(dtype)
