"""Memory of an exchange: the numbers that are averaged together, and scratch for their messages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from ddp_quant_hooks.exchange.plan import Span


def flat_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a contiguous tensor in one row; complex ones are two each."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


def put_back(tensors: Sequence[torch.Tensor], row: torch.Tensor) -> None:
    """Copy numbers that were joined in one row back to their tensors."""
    parts = torch.split(row, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        tensor.copy_(part.view_as(tensor))


class Values:
    """Tensors of one dtype and device, as one row of real numbers. Only chunks of it are ever copied.

    Args:
        tensors: Contiguous; complex ones count as twice as many real numbers.

    Attributes:
        dtype: The dtype of the numbers.
        device: The device of the numbers.
        count: The number of values.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        parts = [flat_real(tensor) for tensor in tensors]
        self._parts = [part for part in parts if part.numel()] or parts[:1]
        self._starts = [0, *accumulate(part.numel() for part in self._parts)]
        self.dtype, self.device, self.count = self._parts[0].dtype, self._parts[0].device, self._starts[-1]

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return self.count * self.dtype.itemsize

    def mark_written(self) -> None:
        """Tell autograd that they change, which does not see what kernels write."""
        # A tensor of inference mode has no version.
        torch.autograd.graph.increment_version([one for one in self._parts if not one.is_inference()])

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of all numbers."""
        return torch.cat([part.to(dtype) for part in self._parts])

    def parts_of(self, spans: Sequence[Span]) -> list[torch.Tensor]:
        """Return the numbers of several spans, in the tensors that have them."""
        return [part for span in spans for part in self.parts(span)]

    def parts(self, span: Span) -> list[torch.Tensor]:
        """Return the numbers of a span, in the tensors that have them."""
        if len(self._parts) == 1:
            return [self._parts[0][span.start : span.stop]]
        first = bisect_right(self._starts, span.start) - 1
        last = max(first + 1, bisect_right(self._starts, span.stop - 1))
        both = zip(self._starts[first:last], self._parts[first:last], strict=True)
        return [part[max(span.start - start, 0) : span.stop - start] for start, part in both]


class Scratch:
    """Hands out pieces of memory, the same ones in the same order whenever it starts over.

    Paging in fresh memory for every bucket would be slower than the wire. The n-th piece is as long as the
    longest that was taken n-th so far.
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
