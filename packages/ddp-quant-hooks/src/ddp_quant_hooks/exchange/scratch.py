"""Memory that is reused for every bucket: paging in fresh memory would be slower than the wire."""

from __future__ import annotations

import torch


class Scratch:
    """Hands out pieces of memory, the same ones in the same order whenever it starts over.

    The n-th piece is as long as the longest that was taken n-th so far.
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
        size, index = count * dtype.itemsize, self._taken
        self._taken += 1
        if index == len(self._pieces):
            self._pieces.append(torch.empty(0, dtype=torch.uint8, device=self._device))
        if self._pieces[index].numel() < size:
            self._pieces[index] = torch.empty(size, dtype=torch.uint8, device=self._device)
        piece = self._pieces[index]
        return piece[:size].view(dtype) if size < piece.numel() or dtype != torch.uint8 else piece
