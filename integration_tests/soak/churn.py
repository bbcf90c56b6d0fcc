"""Make and close states, and make and destroy process groups, many times: nothing is left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks import QuantizedAllreduceState, all_reduce
from dist_utils.testing import run_ranks
from soak.long_runs import CONTROL, Samples, judged, memory_of
from soak.records import resources
from soak.regression import Line
from soak.trainings import TRAININGS

__all__ = ["churn"]

RANKS = 2


def churn(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Make and close as many as requested by the options, and record each outcome.

    Torch's own groups come first: what they leave behind is allowed for ours.

    Args:
        options: Of the command line.
        write: Called with each outcome.
    """
    states = {"groups of torch made and destroyed": _plain_group, "states made and closed": _state}
    jobs = {
        "process groups with plain DDP": partial(_job, CONTROL),
        "process groups made and destroyed": partial(_job, "8 bits, feedback, overlap"),
    }
    for count, kinds in ((options.states, states), (options.groups, jobs)):
        control: dict[str, Line] | None = None
        for what, one in kinds.items() if count else ():
            began = time.monotonic()
            samples = run_ranks(_many, RANKS, one, count, timeout=120 + 2 * count)
            took = round(time.monotonic() - began, 1)
            outcome = judged(samples, control)
            if control is None:
                control = memory_of(outcome)
                outcome |= {"verdict": "torch's own", "problems": []}
            write({"what": what, "count": count, "world_size": RANKS, **outcome, "took": took})


def _many(rank: int, one: Callable[[int, int], None], count: int) -> list[dict[str, float]]:
    samples = Samples(count)
    for number in range(count):
        began = time.perf_counter()
        one(rank, number)
        gc.collect()
        samples.add({**resources(), "seconds": time.perf_counter() - began})
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # run_ranks destroys it
    return samples.all()


def _plain_group(rank: int, number: int) -> None:
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(300), group=group)
    dist.barrier()
    dist.destroy_process_group(group)


def _state(rank: int, number: int) -> None:
    state = QuantizedAllreduceState(min_bytes=0)
    all_reduce(torch.ones(300), dist.ReduceOp.AVG, state)
    state.close()


def _job(training_name: str, rank: int, number: int) -> None:
    if dist.is_initialized():  # the one that run_ranks made
        dist.destroy_process_group()
    server = dist.TCPStore("127.0.0.1", _port(), is_master=False)
    store = dist.PrefixStore(f"group {number}", server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    training = TRAININGS[training_name].begin()
    for step in range(3):
        training.step(step)
    dist.barrier()
    training.close()
    del training
    dist.destroy_process_group()


def _port() -> int:
    import os  # noqa: PLC0415

    return int(os.environ["MASTER_PORT"])
