"""How the ranks that average share the work: in which levels, and how much of a bucket at a time.

Decisions depend only on numbers that all ranks know, so they are identical on all ranks; nothing here
communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul

from ddp_quant_hooks.chunks import Span, shards

__all__ = ["Levels", "chunk_values", "depends_on_hosts", "plan_levels"]

_CHUNK_ELEMENTS = 5 << 18
"""About this many values are on the wire at a time, one chunk after another: four in a 25 MiB bucket, between
two of half the length. Shorter ones cost more messages (four loopback ranks took 20 % longer with half as
many values), longer ones more memory and more time in which the wire idles (4 % on 1 Gbit/s with twice as
many)."""

_PEERS_OF_A_CHUNK = 4
"""A rank with more peers has longer chunks in proportion: a message keeps 270 Ki to 320 Ki values as long as
the bucket allows, so that a larger group takes hardly more messages for each of its ranks than five ranks do.
With chunks of one length for all groups of up to 20 ranks, 25 MiB took 1.1 times as long on eight emulated
hosts with 1 and 10 Gbit/s, and 1.4 times as long among sixteen ranks on loopback."""

_LONGEST_CHUNK = 1 << 23
"""More than a bucket of 25 MiB has; it bounds the memory for larger tensors."""

_CHUNK_ELEMENTS_ON_STREAMS = 1 << 26
"""The same where the host only enqueues: kernels are so much faster than the wire that nothing is gained by
shorter chunks, and each costs launches. It bounds the memory for a very large bucket."""

_DIRECT = 16
"""Up to this many ranks, every rank sends to every other."""

_MOST_LEVELS = 3

_LEAST_LAST = 8
"""The fewest ranks in a row of the last level. It averages the rounding errors of the rows' means: with eight
ranks they add at most 1 / 8 + 1 / 16 to the mean square error of the last rounding: 9 % of error."""

_SECONDS_PER_MESSAGE = 60e-6
"""CPU time of a rank to send one and to receive one, less than 64 KiB on loopback: 60 to 90 microseconds."""

_SECONDS_PER_LEVEL = 200e-6
"""Two more messages that follow one another, and a kernel between them."""

_SECONDS_PER_VALUE = 2e-9
"""Time to encode or decode a value on one thread, while the wire waits for it."""


@dataclass(frozen=True)
class Levels:
    """Ranks in rows, rows of rows, and so on: what is averaged in a row is averaged between rows.

    A row of the first level is of consecutive ranks. The ranks that exchange in a later level have the same
    places in their rows of the levels before, and so own the same shard.

    Attributes:
        sizes: How many ranks a row of each level has. Their product is the number of ranks.
    """

    sizes: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    @property
    def peers(self) -> int:
        """The number of other ranks that a rank sends to: one message each way for each chunk."""
        return sum(size - 1 for size in self.sizes)

    def rows(self, rank: int) -> list[list[int]]:
        """Return the ranks of this rank's row in each level, itself too, in the order of their shards."""
        strides = list(accumulate(self.sizes, mul, initial=1))
        return [
            [rank + (place - rank // stride % size) * stride for place in range(size)]
            for size, stride in zip(self.sizes, strides, strict=False)
        ]

    def shards(self, chunk: Span, rank: int, block_size: int) -> list[Span]:
        """Return the shard of a chunk that this rank averages in each level, part of the one before."""
        found, whole = [], chunk
        for size, row in zip(self.sizes, self.rows(rank), strict=True):
            whole = shards(whole, size, block_size)[row.index(rank)]
            found.append(whole)
        return found


def chunk_values(levels: Levels, *, on_streams: bool, others: int = 0) -> int:
    """Return about how many values are averaged at a time.

    Args:
        levels: The levels of the ranks.
        on_streams: Whether the host only enqueues.
        others: The number of further ranks that a rank sends its values to.
    """
    if on_streams:
        return _CHUNK_ELEMENTS_ON_STREAMS
    peers = max(levels.peers + others, _PEERS_OF_A_CHUNK)
    return min(_CHUNK_ELEMENTS * peers // _PEERS_OF_A_CHUNK, _LONGEST_CHUNK)


def depends_on_hosts(ranks: int) -> bool:
    """Return whether the levels of this many ranks depend on which of them are on one host."""
    return ranks > _DIRECT


@lru_cache(maxsize=4096)
def plan_levels(ranks: int, values: int, ranks_per_host: int = 1) -> Levels:
    """Return the levels in which a bucket takes the least time, by the measured costs.

    Args:
        ranks: The number of ranks.
        values: The values of the bucket.
        ranks_per_host: The number of consecutive ranks on each host, if known: the first levels then stay
            inside hosts.

    Returns:
        The levels. A single one if the number of ranks allows no rows of at least eight in the last level: a
        prime, or a product of small factors only, such as 25 or 49.
    """
    direct = Levels((ranks,))
    if ranks <= _DIRECT or not values:  # a file of residuals may have a bucket without values
        return direct
    possible = [
        Levels(sizes)
        for sizes in _factors(ranks, _MOST_LEVELS)
        if len(sizes) == 1 or sizes[-1] >= _LEAST_LAST
    ]
    if 1 < ranks_per_host < ranks and ranks % ranks_per_host == 0:
        inside = [levels for levels in possible if ranks_per_host in accumulate(levels.sizes, mul)]
        possible = inside or possible
    return min(possible, key=lambda levels: (_seconds(levels, values), levels.sizes))


def _seconds(levels: Levels, values: int) -> float:
    """Estimate the time that depends on the levels; the time of sending bytes does not."""
    chunks = -(-values // chunk_values(levels, on_streams=False))
    of_chunk = 2 * levels.peers * _SECONDS_PER_MESSAGE + len(levels.sizes) * _SECONDS_PER_LEVEL
    means_between: float = sum(values / ranks for ranks in list(accumulate(levels.sizes, mul))[:-1])
    return chunks * of_chunk + (values / chunks + means_between) * _SECONDS_PER_VALUE


def _factors(number: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield all ways to write a number as a product of at most ``most`` factors above one, in any order."""
    yield (number,)
    if most == 1:
        return
    small = [first for first in range(2, math.isqrt(number) + 1) if number % first == 0]
    for first in sorted({*small, *(number // other for other in small)}):
        for rest in _factors(number // first, most - 1):
            yield (first, *rest)
