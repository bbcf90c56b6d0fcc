"""Numbers that are averaged together: those of a bucket, or of several tensors one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch

from ddp_quant_hooks.exchange.scratch import Scratch
from ddp_quant_hooks.exchange.spans import Span

Exchange: TypeAlias = Generator[None, None, None]
"""An exchange of some values: it pauses wherever it would wait."""


def flat_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the numbers of a contiguous tensor in one row; complex ones are two each."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1)


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

    def exchanged(
        self, span: Span, scratch: Scratch, exchange: Callable[[torch.Tensor], Exchange]
    ) -> Exchange:
        """Return what ``exchange`` makes of the numbers of ``span``, which it changes in place."""
        parts = self._cut(span)
        return exchange(parts[0]) if len(parts) == 1 else _gathered(parts, scratch, exchange)

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return self.count * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of all numbers."""
        return torch.cat([part.to(dtype) for part in self._parts])

    def _cut(self, span: Span) -> list[torch.Tensor]:
        first = bisect_right(self._starts, span.start) - 1
        last = max(first + 1, bisect_right(self._starts, span.stop - 1))
        both = zip(self._starts[first:last], self._parts[first:last], strict=True)
        return [part[max(span.start - start, 0) : span.stop - start] for start, part in both]


def _gathered(
    parts: Sequence[torch.Tensor], scratch: Scratch, exchange: Callable[[torch.Tensor], Exchange]
) -> Exchange:
    together = scratch.take(sum(part.numel() for part in parts), parts[0].dtype)
    torch.cat(list(parts), out=together)
    yield from exchange(together)
    for part, changed in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
        part.copy_(changed)
