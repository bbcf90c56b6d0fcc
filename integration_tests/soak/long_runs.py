"""Many steps of every training: resources and step times must not grow."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.testing import run_ranks
from soak.records import resources
from soak.regression import Line, fitted
from soak.trainings import BASELINES, TRAININGS

__all__ = ["Samples", "judged", "memory_of", "run_long"]

SAMPLES = 200
CONTROL = "plain DDP"
ALLOWED = {"heap": 64.0, "kibibytes": 1024.0}
"""Growth in KiB that is always allowed, of memory in use and of resident memory.

A leak is in the first. The second grows also because memory is fragmented, in a few jumps: by 0 to 400 KiB in
10,000 steps.
"""
ALLOWED_WITHOUT_HEAP = 128.0
"""Likewise, of resident memory, where what is in use is not known."""


def run_long(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Run every training for as many steps as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    control: dict[str, Line] = {}
    names = [name for name in TRAININGS if options.training in name and name not in BASELINES]
    for name in [CONTROL, *names]:
        size = max(TRAININGS[name].world_sizes)
        began = time.monotonic()
        samples = run_ranks(_train, size, name, options.steps, timeout=60 + options.steps)
        took = round(time.monotonic() - began, 1)
        outcome = judged(samples, control)
        if name == CONTROL:
            control = memory_of(outcome)
        write({**outcome, "training": name, "world_size": size, "steps": options.steps, "took": took})


class Samples:
    """Preallocated storage for samples, so that adding them takes no memory.

    Args:
        count: The number of samples.
    """

    def __init__(self, count: int) -> None:
        self._names = [*resources(), "seconds"]
        self._values = torch.full((count, len(self._names)), -1.0, dtype=torch.float64)
        self._next = 0

    def add(self, sample: dict[str, float]) -> None:
        """Store one more sample."""
        self._values[self._next] = torch.tensor([sample[name] for name in self._names], dtype=torch.float64)
        self._next += 1

    def all(self) -> list[dict[str, float]]:
        """Return all samples."""
        return [dict(zip(self._names, row, strict=True)) for row in self._values[: self._next].tolist()]


def _train(rank: int, name: str, steps: int) -> list[dict[str, float]]:
    training, every = TRAININGS[name].begin(), max(1, steps // SAMPLES)
    samples = Samples(steps // every)
    for step in range(steps):
        if step % every == 0:
            dist.barrier()
            began = time.perf_counter()
        training.step(step)
        if (step + 1) % every == 0:
            seconds = (time.perf_counter() - began) / every
            samples.add({**resources(), "seconds": seconds})
    training.close()
    return samples.all()


def memory_of(outcome: dict[str, Any]) -> dict[str, Line]:
    """Return an outcome's lines of memory, as a control for others."""
    return {what: Line(**outcome[what]) for what in ALLOWED if what in outcome}


def judged(ranks: list[list[dict[str, float]]], control: dict[str, Line] | None = None) -> dict[str, Any]:
    """Return each quantity's growth on the rank where it is largest, and the verdict.

    Memory may grow as much as in the control, which shows the growth of torch itself and of the loop.

    The first quarter is left out: caches fill, residuals and optimizer states appear, a state chooses.
    """
    found: dict[str, Any] = {}
    problems = []
    allowed = ALLOWED if "heap" in ranks[0][0] else {"kibibytes": ALLOWED_WITHOUT_HEAP}
    for what, least in {
        **allowed,
        "threads": 0.0,
        "kernel_threads": 0.0,
        "descriptors": 0.0,
        "seconds": 0.0,
    }.items():
        lines = [fitted([sample[what] for sample in rank[len(rank) // 4 :]]) for rank in ranks]
        worst = max(lines, key=lambda line: line.growth)
        found[what] = {name: round(value, 6) for name, value in worst._asdict().items()}
        if control and what in control:
            own = control[what]
            worst = Line(worst.growth - own.growth, math.hypot(worst.error, own.error), worst.mean)
        if worst.growth > 0 and not worst.is_flat(least):
            problems.append(f"{what} grow by {worst.growth:.4g} (error {worst.error:.2g})")
    return {**found, "verdict": "wrong" if problems else "right", "problems": problems}
