"""How many ranks share the work: in which levels, and how much of a bucket at a time.

Decisions depend only on numbers that all ranks know, so they are identical on all ranks; nothing here
communicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from operator import mul

_CHUNK_VALUES = 5 << 18
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

_CHUNK_VALUES_ON_STREAMS = 1 << 26
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


def chunk_values(peers: int, *, on_streams: bool) -> int:
    """Return about how many values are averaged at a time.

    Args:
        peers: The number of other ranks that a rank sends to.
        on_streams: Whether the host only enqueues.
    """
    if on_streams:
        return _CHUNK_VALUES_ON_STREAMS
    return min(_CHUNK_VALUES * max(peers, _PEERS_OF_A_CHUNK) // _PEERS_OF_A_CHUNK, _LONGEST_CHUNK)


@lru_cache(maxsize=4096)
def choose_levels(ranks: int, values: int) -> tuple[int, ...]:
    """Return the levels in which ``values`` values take the least time, by the measured costs.

    Returns:
        How many ranks a row of each level has; the product is the number of ranks. A single level up to 16
        ranks, and if the number of ranks allows no rows of at least eight in the last level: a prime, or a
        product of small factors only, such as 25 or 49.
    """
    if ranks <= _DIRECT:
        return (ranks,)
    possible = [
        sizes for sizes in _factors(ranks, _MOST_LEVELS) if len(sizes) == 1 or sizes[-1] >= _LEAST_LAST
    ]
    return min(possible, key=lambda sizes: (_seconds(sizes, values), sizes))


def _seconds(sizes: tuple[int, ...], values: int) -> float:
    """Estimate the time that depends on the levels; the time of sending bytes does not."""
    peers = sum(size - 1 for size in sizes)
    chunks = max(1, -(-values // chunk_values(peers, on_streams=False)))
    of_chunk = 2 * peers * _SECONDS_PER_MESSAGE + len(sizes) * _SECONDS_PER_LEVEL
    means_between: float = sum(values / ranks for ranks in list(accumulate(sizes, mul))[:-1])
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
