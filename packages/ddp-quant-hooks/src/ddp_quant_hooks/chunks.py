"""Cut a bucket into chunks that are sent one after another, and each chunk into shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

__all__ = ["Span", "cut", "shard_lengths", "shards"]


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of something flat."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


def cut(length: int, most: int, block_size: int) -> list[Span]:
    """Cut ``length`` elements into chunks of at most about ``most``, at block boundaries.

    The first and the last are half as long as the others: the wire idles while the first is encoded and
    while the last is decoded.
    """
    count = -(-length // most)
    if count <= 1:
        return [Span(0, length)]
    blocks = -(-length // block_size)
    cuts = [(2 * index + 1) * blocks // (2 * count) for index in range(count)]
    bounds = [0, *cuts, blocks]
    spans = [Span(low * block_size, min(high * block_size, length)) for low, high in pairwise(bounds)]
    return [span for span in spans if len(span)]


def shards(chunk: Span, count: int, block_size: int) -> list[Span]:
    """Cut a chunk into one shard per rank, at block boundaries; some are empty if there are few blocks."""
    bounds = [chunk.start + bound for bound in _bounds(len(chunk), count, block_size)]
    return [Span(low, high) for low, high in pairwise(bounds)]


def shard_lengths(length: int, count: int, block_size: int) -> list[int]:
    """Return the lengths of the shards of a chunk of ``length`` elements."""
    return [high - low for low, high in pairwise(_bounds(length, count, block_size))]


def _bounds(length: int, count: int, block_size: int) -> list[int]:
    blocks = -(-length // block_size)
    bounds = [blocks * index // count * block_size for index in range(count)]
    return [*bounds, length]  # the last block may be shorter
