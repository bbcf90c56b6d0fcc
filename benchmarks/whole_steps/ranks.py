"""The work of a rank: it steps every side in turns, and records seconds and bytes."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

import memory
import torch
import torch.distributed as dist
from emulated_hosts import interface_bytes
from tasks import MODELS, Task
from whole_steps.sides import COMPUTE, PLAIN, Side, make_side

from dist_utils.testing import tcp_bytes_sent

WARM_UP = 4
"""Uncounted first steps of each side: DDP rebuilds its buckets, and powerSGD warms up."""
MOST_TRIALS = 110
"""Steps after which an automatic side must have chosen."""


@dataclass(frozen=True)
class Job:
    """The measurements of one process group.

    Args:
        model: The model's name.
        sides: The sides that take turns, always including plain DDP.
        repeats: Steps of each side.
        patience: Seconds until a collective times out.
    """

    model: str
    sides: tuple[str, ...]
    repeats: int
    patience: float = 300.0


def measure(rank: int, job: Job) -> dict[str, Any]:
    """Return this rank's seconds and bytes of every step, by side, with the buckets and what was chosen."""
    memory.keep_freed_memory()
    model = MODELS[job.model]
    task = model.task()
    sides = {name: make_side(name, model, task) for name in job.sides}
    batches = torch.Generator().manual_seed(rank)
    chosen = {name: let_choose(side, task, batches) for name, side in sides.items() if side.choosing}
    turns = [COMPUTE, *sides]
    seen: dict[str, Any] = {"chosen": chosen}
    seen |= {kind: {name: [] for name in turns} for kind in ("seconds", "tcp_bytes", "wire_bytes")}
    gc.collect()
    gc.disable()
    for repeat in range(-WARM_UP, job.repeats):
        examples = task.draw(task.batch, batches)
        for name in turns if repeat % 2 else reversed(turns):
            # Without communication, plain DDP's model is used, to save memory.
            side = sides[PLAIN if name == COMPUTE else name]
            before = tcp_bytes_sent(), interface_bytes()[1]
            dist.barrier()
            began = time.perf_counter()
            side.step(task, examples, alone=name == COMPUTE)
            seconds = time.perf_counter() - began
            dist.barrier()  # so that the hosts' interfaces have sent the data of all their ranks
            after = tcp_bytes_sent(), interface_bytes()[1]
            if repeat >= 0:
                seen["seconds"][name].append(seconds)
                seen["tcp_bytes"][name].append(after[0] - before[0])
                seen["wire_bytes"][name].append(after[1] - before[1])
    seen["buckets"] = {name: side.bucket_bytes() for name, side in sides.items()}
    seen["parameters"] = sum(parameter.numel() for parameter in sides[PLAIN].ddp.parameters())
    for side in sides.values():
        side.close()
    return seen


def let_choose(side: Side, task: Task, batches: torch.Generator) -> dict[str, Any]:
    """Train one side, without turns, until it has chosen; return the number of steps and the choice."""
    for step in range(1, MOST_TRIALS + 1):
        side.step(task, task.draw(task.batch, batches))
        if not side.choosing:
            choice = side.state.choice
            return {"steps": step, "candidate": choice.candidate, "why": choice.why}
    raise RuntimeError(f"nothing was chosen in {MOST_TRIALS} steps")
