"""Cut a bucket into chunks that are sent one after another, and each chunk into shards."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of something flat.

    Attributes:
        start: The first element.
        stop: The one after the last.
        weight: Of residuals: the share of such a value in the mean of all ranks. Residuals of different
            weights do not mix.
    """

    start: int
    stop: int
    weight: float = 0.0

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


def shard_lengths(length: int, count: int, block_size: int) -> tuple[int, ...]:
    """Cut a chunk into shards at block boundaries, and return their lengths; some are 0 if blocks are few."""
    blocks = -(-length // block_size)
    bounds = [blocks * index // count * block_size for index in range(count)]
    return tuple(high - low for low, high in pairwise([*bounds, length]))  # the last block may be shorter
