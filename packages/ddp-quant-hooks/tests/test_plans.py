"""Plans of averages: bytes and messages are counted for up to 1,024 ranks, without communication."""

import itertools
import math
from collections import Counter

import pytest

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.exchange.levels import choose_levels, chunk_values
from ddp_quant_hooks.exchange.placement import Placement
from ddp_quant_hooks.exchange.plan import Formats
from ddp_quant_hooks.exchange.planner import plan_average, plan_reduce_scatter
from ddp_quant_hooks.kernels import Layout

BUCKET = 25 * 2**18
EIGHT_BITS = Layout("int8", 128, rotate=True)
FORMATS = Formats(EIGHT_BITS, EIGHT_BITS, 4)
SCALES = 1 + 4 / 128
"""Bytes of a value in 8 bits, with its share of the scale."""


def _placement(text, inside="full"):
    return Placement(tuple(int(host, 36) for host in text), inside)


def _hosts(count, ranks, inside="full"):
    return Placement(tuple(rank // ranks for rank in range(count * ranks)), inside)


def _plans(placement, count=BUCKET, plan=plan_average, **options):
    return [plan(placement, rank, count, FORMATS, **options) for rank in range(len(placement.hosts))]


def _sends(plan):
    """Return the rank and the bytes of every message that is sent."""
    return [message for chunk in plan.chunks for message in chunk.sends(FORMATS) if message[1]]


def _busiest(plans, hosts):
    """Return the bytes on the busiest host's link, in the direction that carries more."""
    sent, received = Counter(), Counter()
    for rank, plan in enumerate(plans):
        for to, size in _sends(plan):
            if hosts[to] != hosts[rank]:
                sent[hosts[rank]] += size
                received[hosts[to]] += size
    assert sum(sent.values()) == sum(plan.bytes_between_hosts for plan in plans)
    return max([*sent.values(), *received.values(), 0])


@pytest.mark.parametrize(
    "hosts",
    ["0101", "001122", "00111", "0112223333", "0" * 8 + "1" * 8, "01234567" * 8],
)
@pytest.mark.parametrize("inside", ["full", "quantized"])
def test_a_hosts_link_carries_what_it_must(hosts, inside):
    placement = _placement(hosts, inside)
    count, ranks = len(set(hosts)), len(hosts)
    plans = _plans(placement)
    assert _busiest(plans, placement.hosts) <= 1.01 * SCALES * 2 * (count - 1) / count * BUCKET
    shard = BUCKET // ranks
    most = max(hosts.count(host) for host in hosts)
    limit = max(most * (count - 1), ranks - min(hosts.count(host) for host in hosts)) * shard
    scattered = _plans(placement, shard, plan_reduce_scatter)
    assert _busiest(scattered, placement.hosts) <= 1.01 * SCALES * limit
    flat = _busiest(_plans(_placement(hosts, "flat")), placement.hosts)
    assert flat >= 0.99 * most * (1 - most / ranks) / (1 - 1 / count) * _busiest(plans, placement.hosts)


@pytest.mark.parametrize(("hosts", "ranks"), [(2, 8), (17, 4), (32, 8), (256, 4)])
def test_many_hosts_average_between_hosts_in_levels(hosts, ranks):
    placement = _hosts(hosts, ranks)
    count = 1 << 22
    plans = [plan_average(placement, rank, count, FORMATS) for rank in range(hosts * ranks)]
    assert _busiest(plans, placement.hosts) <= 1.02 * SCALES * 2 * (hosts - 1) / hosts * count
    messages = max(len(_sends(plan)) for plan in plans)
    chunks = len(plans[0].chunks)
    assert messages <= 2 * chunks * (ranks - 1 + (hosts - 1 if hosts <= 17 else hosts / 2 + 1))
    rounded = sum(map(len, plans[0].slots["own"]))
    assert rounded <= count / ranks + 128 * chunks, "only the rank that averages a shard rounds it"


@pytest.mark.parametrize("plan", [plan_average, plan_reduce_scatter])
def test_what_a_rank_rounds_before_any_sum_has_its_share_of_the_mean(plan):
    for hosts in ("00112233", "00011123"):
        plans = _plans(_placement(hosts, "quantized"), 10_000, plan)
        assert {span.weight for one in plans for span in one.slots["own"]} == {1 / 8}


def _stages(stage):
    """Yield what all ranks of its row must plan alike, for a stage and further ones."""
    alike = stage.way, stage.lengths, stage.outgoing, stage.means, stage.mean_lengths, stage.messages_per_mean
    yield stage.tag, stage.ranks, alike
    for further in stage.further:
        yield from _stages(further)


@pytest.mark.parametrize("hosts", ["000", "0011", "00111", "0112223333", "01234567" * 3])
@pytest.mark.parametrize("inside", ["full", "quantized", "flat"])
def test_all_ranks_of_a_row_expect_what_the_others_send(hosts, inside):
    for count, plan in itertools.product((1, 127, 100_001), (plan_average, plan_reduce_scatter)):
        planned = {}
        for rank, own in enumerate(_plans(_placement(hosts, inside), count, plan)):
            for number, chunk in enumerate(own.chunks):
                for tag, ranks, alike in _stages(chunk.stage):
                    planned.setdefault((number, tag, ranks), {})[rank] = alike
        for (number, tag, ranks), by_rank in planned.items():
            assert sorted(by_rank) == sorted(ranks), (count, number, tag)
            assert len(set(by_rank.values())) == 1, (count, number, tag, by_rank)


@pytest.mark.parametrize("ranks", [2, 3, 16, 17, 18, 24, 25, 32, 96, 97, 256, 1000, 1024])
def test_messages_of_ranks_on_their_own_hosts_grow_no_faster_than_a_rings_and_bytes_stay(ranks):
    placement = Placement(tuple(range(ranks)), "flat")
    sizes = choose_levels(ranks, BUCKET)
    assert math.prod(sizes) == ranks
    for rank in {0, 1, ranks // 2, ranks - 1}:
        plan = plan_average(placement, rank, BUCKET, FORMATS)
        # Chunks grow with the peers: 4 have six of a bucket, 19 have three, and more a single one.
        assert len(_sends(plan)) <= max(2 * (ranks - 1), 2 * 19 * 3)
        assert plan.bytes_sent <= SCALES * (2 * (1 - 1 / ranks) * BUCKET + 6 * 2 * ranks * 128)
        assert plan.bytes_between_hosts == plan.bytes_sent
    peers = sum(size - 1 for size in sizes)
    if ranks <= 16 or ranks == 25 or all(ranks % size for size in range(2, math.isqrt(ranks) + 1)):
        assert sizes == (ranks,), "few ranks, a prime number of them, or too small factors"
    elif ranks >= 24:
        assert peers <= ranks / 2 + 1
        shares = [1 / math.prod(sizes[level:]) for level in range(1, len(sizes))]
        assert sum(shares) <= 3 / 16, "what is added to the mean square of the error"
    if ranks >= 1000:
        assert len(_sends(plan)) < 2 * (ranks - 1) / 5


def test_small_groups_keep_their_chunks_and_larger_ones_have_longer_chunks():
    for peers in (1, 3, 4):
        assert chunk_values(peers, on_streams=False) == 5 << 18
    for peers in (5, 7, 15, 23):
        assert chunk_values(peers, on_streams=False) // (peers + 1) >= 270_000
    assert BUCKET < chunk_values(1020, on_streams=False) <= 1 << 23
    for peers in (1, 1023):
        assert chunk_values(peers, on_streams=True) == 1 << 26


def test_buckets_of_64_kib_are_averaged_exactly_and_the_first_of_ddp_never():
    options = QuantizedAllreduceState().options
    sizes = [options.least_bytes(ranks) for ranks in range(2, 4097)]
    assert sizes == sorted(sizes)
    assert sizes[0] > 1 << 16
    assert sizes[-1] <= 1 << 20
