"""The payload: a bucket in pieces, each cast to the wire dtype, in the bucket's own memory where it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch

from dist_utils.finite_means import clamp_mean, largest_share

__all__ = [
    "Clamp",
    "Piece",
    "block_scratch",
    "blocks",
    "largest_share_for_fp32_sum",
    "pieces",
]

Clamp: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Brings values into the range of the wire dtype, before the cast."""

_BLOCK = 1 << 16
"""Elements that are cast at once on a CPU, so that the temporary stays in the core's cache."""


def blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Cut flat tensors of equal length into matching blocks: cache-sized on CPUs, whole elsewhere."""
    if tensors[0].device.type != "cpu":
        yield tensors
    else:
        cut = (torch.split(tensor, _BLOCK) for tensor in tensors)
        yield from zip(*cut, strict=True)


def block_scratch(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scratch memory for one block of ``tensor``, reused because fresh pages would be slow."""
    length = tensor.numel() if tensor.device.type != "cpu" else min(_BLOCK, tensor.numel())
    return tensor.new_empty(length, dtype=dtype)


class Piece:
    """A part of a bucket and the same part in the wire dtype.

    Args:
        values: The part of the bucket, flat. On CPUs its memory also holds the payload if that is
            no wider (a 16-bit payload fits twice): between :meth:`encode` and :meth:`decode` the values
            are gone, and nothing is allocated.
        wire_dtype: The dtype that is sent.

    Attributes:
        values: As given.
        payload: The same number of elements in ``wire_dtype``.
    """

    def __init__(self, values: torch.Tensor, wire_dtype: torch.dtype) -> None:
        self.values = values
        self._spare = values.new_empty(0, dtype=wire_dtype)
        self._aliased = False
        if wire_dtype == values.dtype:
            self.payload = values
        elif values.device.type == "cpu" and wire_dtype.itemsize <= values.element_size():
            memory = values.view(wire_dtype)
            self.payload, self._spare = memory[: values.numel()], memory[values.numel() :]
            self._aliased = True
        else:
            self.payload = torch.empty_like(values, dtype=wire_dtype)

    def spare(self, count: int) -> torch.Tensor:
        """Return memory for ``count`` more elements of the wire dtype, valid until :meth:`decode`."""
        return self._spare[:count] if count <= self._spare.numel() else self.payload.new_empty(count)

    def encode(self, divisor: int, clamp: Clamp | None = None) -> None:
        """Fill the payload with this rank's share of the mean: divided in full precision, then cast."""
        precision = torch.promote_types(self.values.dtype, self.payload.dtype)
        if clamp is None and precision == self.values.dtype and not self._aliased:
            torch.div(self.values, divisor, out=self.payload)  # one kernel, no temporary on a GPU
            return
        # Front to back: a payload block lies at or before its values, never over unread ones.
        scratch = block_scratch(self.values, precision)
        for values, payload in blocks(self.values, self.payload):
            share = torch.div(values.to(precision), divisor, out=scratch[: values.numel()])
            payload.copy_(share if clamp is None else clamp(share))

    def decode(self) -> None:
        """Fill the values from the payload."""
        if not self._aliased:
            if self.payload is not self.values:
                self.values.copy_(clamp_mean(self.payload, self.values.dtype))
            return
        # Back to front, so that no unread payload is overwritten.
        scratch = block_scratch(self.payload, self.payload.dtype)
        for values, payload in reversed(list(blocks(self.values, self.payload))):
            values.copy_(clamp_mean(scratch[: payload.numel()].copy_(payload), values.dtype))


def pieces(values: torch.Tensor, wire_dtype: torch.dtype, most_bytes: int) -> list[Piece]:
    """Cut flat ``values`` into pieces of at most ``most_bytes`` on the wire, the same on every rank.

    The first and the last are half as long as the others: the wire idles while the first is encoded and
    while the last is decoded. On other devices there is one piece, because a stream overlaps by itself.
    """
    most = most_bytes // wire_dtype.itemsize
    count = -(-values.numel() // most)
    if count <= 1 or values.device.type != "cpu":
        return [Piece(values, wire_dtype)]
    cuts = [(2 * index + 1) * values.numel() // (2 * count) for index in range(count)]
    return [Piece(part, wire_dtype) for part in values.tensor_split(cuts)]


def largest_share_for_fp32_sum(wire_dtype: torch.dtype, world_size: int) -> float:
    """Return the largest share that fits ``wire_dtype`` and has a finite sum over all ranks in fp32."""
    largest: float = torch.finfo(wire_dtype).max
    fits = largest * world_size <= torch.finfo(torch.float32).max
    return largest if fits else largest_share(wire_dtype, world_size)
