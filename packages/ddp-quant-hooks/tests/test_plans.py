"""The levels in which many ranks average: counts from the plans that the exchanges follow."""

import math
from itertools import pairwise

import pytest

from ddp_quant_hooks import QuantizedAllreduceState, hosts
from ddp_quant_hooks.chunks import Span, cut
from ddp_quant_hooks.plans import Levels, chunk_values, plan_levels

BLOCK = 128
BUCKET = 25 * 2**18
WORLDS = [
    2,
    3,
    4,
    8,
    16,
    17,
    18,
    24,
    25,
    31,
    32,
    64,
    96,
    97,
    128,
    194,
    256,
    384,
    509,
    512,
    1000,
    1024,
    2048,
    4096,
]


def _counted(levels, values, rank):
    """Return how many messages a rank sends for a bucket, and how many values they have."""
    messages = sent = 0
    for chunk in cut(values, chunk_values(levels, on_streams=False), BLOCK):
        own, wholes = levels.shards(chunk, rank, BLOCK), [chunk]
        wholes += own[:-1]
        for size, whole, shard in zip(levels.sizes, wholes, own, strict=True):
            messages += 2 * (size - 1)
            sent += (
                len(whole) - len(shard) + (size - 1) * len(shard)
            )  # what the others own, and this rank's mean
    return messages, sent


@pytest.mark.parametrize("ranks", WORLDS)
def test_messages_grow_no_faster_than_a_rings_and_bytes_stay(ranks):
    levels = plan_levels(ranks, BUCKET)
    assert levels.ranks == ranks
    for rank in {0, 1, ranks // 2, ranks - 1}:
        messages, sent = _counted(levels, BUCKET, rank)
        # Chunks grow with the peers: 4 have six of a bucket, 19 have three, and more a single one.
        assert messages <= max(2 * (ranks - 1), 2 * 19 * 3)
        assert sent <= 2 * (1 - 1 / ranks) * BUCKET + 6 * 2 * ranks * BLOCK
    if ranks <= 16 or ranks == 25 or all(ranks % size for size in range(2, math.isqrt(ranks) + 1)):
        assert levels.sizes == (ranks,), "few ranks, a prime number of them, or too small factors"
    elif ranks >= 24:
        assert levels.peers <= ranks / 2 + 1
        shares = [1 / math.prod(levels.sizes[level:]) for level in range(1, len(levels.sizes))]
        assert sum(shares) <= 3 / 16, "what is added to the mean square of the error"


def test_a_thousand_ranks_take_a_tenth_of_a_rings_messages():
    for ranks in (1024, 2048, 4096):
        messages, _ = _counted(plan_levels(ranks, BUCKET), BUCKET, 0)
        assert messages < 2 * (ranks - 1) / 5


@pytest.mark.parametrize("sizes", [(7,), (2, 3), (3, 4, 2), (8, 16), (16, 16, 16)])
def test_ranks_of_a_row_agree_on_it_and_shards_cover_the_chunk_once(sizes):
    levels, chunk = Levels(sizes), Span(256, 256 + 100_000)
    seen = {rank: levels.rows(rank) for rank in range(levels.ranks)}
    for rank, rows in seen.items():
        assert all(rank in row for row in rows)
        assert all(seen[peer][level] == row for level, row in enumerate(rows) for peer in row)
        assert rows[0] == list(range(rows[0][0], rows[0][0] + sizes[0])), "a row is of consecutive ranks"
        others = [peer for row in rows for peer in row if peer != rank]
        assert len(set(others)) == len(others) == levels.peers
    own = [levels.shards(chunk, rank, BLOCK) for rank in range(levels.ranks)]
    parts = sorted((shards[-1].start, shards[-1].stop) for shards in own if len(shards[-1]))
    assert parts[0][0] == chunk.start
    assert parts[-1][1] == chunk.stop
    assert all(left[1] == right[0] for left, right in pairwise(parts))
    for rank, rows in seen.items():  # in every level, the ranks that exchange cut the same shard
        for level in range(1, len(sizes)):
            assert all(own[peer][level - 1] == own[rank][level - 1] for peer in rows[level])


def test_no_values_need_no_levels():
    assert plan_levels(32, 0, ranks_per_host=8) == Levels((32,))


def test_the_first_levels_stay_inside_of_hosts():
    for ranks, per_host in ((64, 8), (1024, 8), (1024, 4), (96, 6), (4096, 16)):
        sizes = plan_levels(ranks, BUCKET, per_host).sizes
        products = [math.prod(sizes[: level + 1]) for level in range(len(sizes))]
        assert per_host in products, sizes
    assert plan_levels(64, BUCKET, 5) == plan_levels(64, BUCKET)


def test_small_groups_keep_their_chunks_and_larger_ones_have_longer_chunks():
    for ranks in (2, 4, 5):
        assert chunk_values(Levels((ranks,)), on_streams=False) == 5 << 18
    for ranks in (6, 8, 16, 24):
        assert chunk_values(Levels((ranks,)), on_streams=False) // ranks >= 270_000
    assert BUCKET < chunk_values(Levels((1021,)), on_streams=False) <= 1 << 23
    for ranks in (2, 1024):
        assert chunk_values(Levels((ranks,)), on_streams=True) == 1 << 26


def test_buckets_of_64_kib_are_averaged_exactly_and_the_first_of_ddp_never():
    options = QuantizedAllreduceState().options
    sizes = [options.least_bytes(ranks) for ranks in range(2, 4097)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 1 << 16
    assert sizes[-1] <= 1 << 20


_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK")


@pytest.mark.parametrize(
    ("told", "found"),
    [
        ((24, 11, 8, 3, 3, 1), 8),
        ((20, 11, 8, 3, 3, 1), 1),  # a host has fewer
        ((24, 11, 8, 2, 3, 1), 1),  # ranks are numbered differently
        ((48, 11, 8, 3, 6, 1), 1),  # the group has only some of them
        ((24, 11, 8, 3, "three", 1), 1),
        ((), 1),
    ],
)
def test_hosts_of_equal_size_are_known_from_the_launcher(monkeypatch, told, found):
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(_VARIABLES, told, strict=False):
        monkeypatch.setenv(name, str(value))
    assert hosts.ranks_per_host(24) == found
