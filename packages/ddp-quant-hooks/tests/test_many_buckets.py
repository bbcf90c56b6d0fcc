"""A large number of steps of many small buckets with a slow rank: no hang, and nothing grows."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
import torch
from quant_buckets import make_state
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks import quantized_allreduce_hook
from dist_utils.testing import run_ranks

LAYERS = 6


def _resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _many(rank, steps):
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(40, 40) for _ in range(LAYERS))), bucket_cap_mb=0.004
    )
    state = make_state("feedback both")
    model.register_comm_hook(state, quantized_allreduce_hook)
    threads, memory = [], []
    sleeps = random.Random(rank)
    for step in range(steps):
        if rank == 1 and step % 10 == 0:
            time.sleep(0.01 * sleeps.random())
        model(torch.ones(2, 40)).sum().backward()
        model.zero_grad()
        if step in {steps // 5, steps - 1}:
            threads.append(threading.active_count())
            memory.append(_resident_mib())
    return state.statistics.quantized_buckets, threads, memory


@pytest.mark.parametrize("steps", [200, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_many_steps_with_a_slow_rank_neither_hang_nor_grow(steps):
    for buckets, threads, memory in run_ranks(_many, 3, steps, timeout=150):
        assert buckets > steps * (LAYERS - 1)  # the first step has fewer
        assert threads[0] == threads[1]
        # One leaked tensor of the smallest kind (4 KiB with its bookkeeping) a bucket would be 18 MiB.
        assert memory[1] - memory[0] < 8
