"""Numbers that are averaged together: those of a bucket, or of several tensors one after another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from ddp_quant_hooks.chunks import Span
from ddp_quant_hooks.exchanges import Exchange
from ddp_quant_hooks.scratch import Scratch

__all__ = ["Values", "flat_real"]


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

    def exchanged(self, span: Span, exchange: Callable[..., Exchange]) -> Callable[[Scratch], Exchange]:
        """Return a function that starts ``exchange``, which changes ``values``, the numbers of ``span``."""
        first, last = bisect_right(self._starts, span.start) - 1, bisect_right(self._starts, span.stop - 1)
        if last - first <= 1:
            start = self._starts[first]
            return partial(exchange, values=self._parts[first][span.start - start : span.stop - start])
        return partial(_gathered, parts=self._cut(span, first, last), exchange=exchange)

    @property
    def nbytes(self) -> int:
        """Their size in bytes."""
        return self.count * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of all numbers."""
        return torch.cat([part.to(dtype) for part in self._parts])

    def multiply(self, factor: int) -> None:
        """Multiply all numbers in place."""
        for part in self._parts:
            part.mul_(factor)

    def _cut(self, span: Span, first: int, last: int) -> list[torch.Tensor]:
        found = []
        for start, part in zip(self._starts[first:last], self._parts[first:last], strict=True):
            found.append(part[max(span.start - start, 0) : span.stop - start])
        return found


def _gathered(scratch: Scratch, *, parts: list[torch.Tensor], exchange: Callable[..., Exchange]) -> Exchange:
    together = scratch.take(sum(part.numel() for part in parts), parts[0].dtype)
    torch.cat(parts, out=together)
    yield from exchange(scratch, values=together)
    for part, changed in zip(parts, torch.split(together, [part.numel() for part in parts]), strict=True):
        part.copy_(changed)
