"""Bytes on the wire, counted by the kernel: the payload of a ring, for every way to sum."""

import statistics
import sys

import pytest
import torch
import torch.distributed as dist
from hook_buckets import HOOKS, make_bucket, run_hook, state_of

from dist_utils.testing import run_ranks, tcp_bytes_sent

ELEMENTS = 600_000

pytestmark = [
    pytest.mark.short,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts sent bytes (GPU or not)"),
]


def _count(rank):
    bucket = make_bucket()
    sent = {}
    # All are kept until the end, because bytes of closed connections are not counted.
    states = {name: state_of(name) for name in HOOKS}
    for name, state in states.items():
        run_hook(name, bucket, torch.ones(10), state=state)  # makes groups and connections
        counts = []
        for _ in range(3):
            dist.barrier()
            before = tcp_bytes_sent()
            run_hook(name, bucket, torch.ones(ELEMENTS), state=state)
            dist.barrier()
            counts.append(tcp_bytes_sent() - before)
        sent[name] = statistics.median(counts)  # on a loaded machine the kernel may retransmit in one run
    return sent


@pytest.mark.parametrize("world_size", [2, 3])
def test_sent_bytes_are_those_of_a_ring_in_the_wire_dtype(world_size):
    ranks = run_ranks(_count, world_size, timeout=120)
    for name, (_, wire, _) in HOOKS.items():
        payload = 2 * (world_size - 1) / world_size * ELEMENTS * (wire or torch.float32).itemsize
        for sent in ranks:
            # More: Gloo's message headers, and the barrier. Less: a ring's segments are not all equal.
            assert 0.999 * payload < sent[name] < 1.01 * payload, name
