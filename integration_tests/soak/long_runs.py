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

__all__ = ["run_long"]

SAMPLES = 200
CONTROL = "plain DDP"
ALLOWED_KIBIBYTES = 128.0
"""Total growth of a process's memory that is always allowed. Plain DDP grew by 0, 55 and 75 KiB in three runs
of 10,000 steps."""


def run_long(options: Any, write: Callable[[dict[str, Any]], None]) -> None:
    """Run every training for as many steps as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.
    """
    control: Line | None = None
    names = [name for name in TRAININGS if options.training in name and name not in BASELINES]
    for name in [CONTROL, *names]:
        size = max(TRAININGS[name].world_sizes)
        began = time.monotonic()
        samples = run_ranks(_train, size, name, options.steps, timeout=60 + options.steps)
        took = round(time.monotonic() - began, 1)
        outcome = judged(samples, control)
        if name == CONTROL:
            control = Line(**outcome["kibibytes"])
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


def judged(ranks: list[list[dict[str, float]]], control: Line | None = None) -> dict[str, Any]:
    """Return each quantity's growth on the rank where it is largest, and the verdict.

    Memory may grow as much as in the control, which shows the growth of torch itself and of the loop.

    The first quarter is left out: caches fill, residuals and optimizer states appear, a state chooses.
    """
    found: dict[str, Any] = {}
    problems = []
    for what, least in {
        "kibibytes": ALLOWED_KIBIBYTES,
        "threads": 0.0,
        "kernel_threads": 0.0,
        "descriptors": 0.0,
        "seconds": 0.0,
    }.items():
        lines = [fitted([sample[what] for sample in rank[len(rank) // 4 :]]) for rank in ranks]
        worst = max(lines, key=lambda line: line.growth)
        found[what] = {name: round(value, 6) for name, value in worst._asdict().items()}
        if what == "kibibytes" and control is not None:
            worst = Line(worst.growth - control.growth, math.hypot(worst.error, control.error), worst.mean)
        if worst.growth > 0 and not worst.is_flat(least):
            problems.append(f"{what} grow by {worst.growth:.4g} (error {worst.error:.2g})")
    return {**found, "verdict": "wrong" if problems else "right", "problems": problems}
