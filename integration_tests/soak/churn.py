"""Make and close states, and make and destroy process groups, many times: nothing is left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce
from dist_utils.testing import run_ranks
from soak.long_runs import Samples, judged
from soak.records import resources
from soak.trainings import TRAININGS

__all__ = ["churn"]

RANKS = 2


def churn(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Make and close as many as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    for what, count, rounds in (
        ("states made and closed", options.states, _states),
        ("process groups made and destroyed", options.groups, _groups),
    ):
        if count:
            began = time.monotonic()
            samples = run_ranks(rounds, RANKS, count, timeout=120 + count)
            took = round(time.monotonic() - began, 1)
            write({"what": what, "count": count, "world_size": RANKS, **judged(samples), "took": took})


def _states(rank: int, count: int) -> list[dict[str, float]]:
    samples = Samples(count)
    for _ in range(count):
        began = time.perf_counter()
        state = QuantizedAllreduceState(min_bytes=0)
        all_reduce(torch.ones(300), dist.ReduceOp.AVG, state)
        state.close()
        del state
        gc.collect()
        samples.add({**resources(), "seconds": time.perf_counter() - began})
    return samples.all()


def _groups(rank: int, count: int) -> list[dict[str, float]]:
    samples = Samples(count)
    dist.destroy_process_group()
    for number in range(count):
        began = time.perf_counter()
        server = dist.TCPStore("127.0.0.1", _port(), is_master=False)
        store = dist.PrefixStore(f"group {number}", server)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        training = TRAININGS["8 bits, feedback, overlap"].begin()
        for step in range(3):
            training.step(step)
        dist.barrier()
        training.close()
        del training
        dist.destroy_process_group()
        del store, server
        gc.collect()
        samples.add({**resources(), "seconds": time.perf_counter() - began})
    dist.init_process_group("gloo")  # run_ranks destroys it
    return samples.all()


def _port() -> int:
    import os  # noqa: PLC0415

    return int(os.environ["MASTER_PORT"])
