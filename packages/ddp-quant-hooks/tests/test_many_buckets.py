"""A large number of steps of many small buckets with a slow rank: no hang, and nothing grows."""

import os
import random
import threading
import time
from pathlib import Path

import torch
from quant_buckets import make_state
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import quantized_allreduce_hook
from dist_utils.testing import run_ranks

LAYERS, STEPS = 6, 200


def _resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _many(rank):
    net = torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(LAYERS)))
    model, state = DistributedDataParallel(net, bucket_cap_mb=0.004), make_state("feedback both")
    model.register_comm_hook(state, quantized_allreduce_hook)
    seen, sleeps = [], random.Random(rank)
    for step in range(STEPS):
        if rank == 1 and step % 10 == 0:
            time.sleep(0.01 * sleeps.random())
        model(torch.ones(2, 40)).sum().backward()
        model.zero_grad()
        if step in {STEPS // 5, STEPS - 1}:
            seen.append((threading.active_count(), _resident_mib()))
    return state.statistics.quantized_buckets, *seen


def test_many_steps_with_a_slow_rank_neither_hang_nor_grow():
    for buckets, (threads, memory), (threads_later, memory_later) in run_ranks(_many, 3, timeout=150):
        assert buckets > STEPS * (LAYERS - 1)  # the first step has fewer
        assert threads == threads_later
        # One leaked tensor of the smallest kind (4 KiB with its bookkeeping) a bucket would be 4 MiB.
        assert memory_later - memory < 3
