"""Many steps of every training, many process groups and states: what a process holds must not grow."""

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, linear_regression
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from trainings import BASELINES, TRAININGS, Places

from dist_utils import resolve_group
from dist_utils.testing import run_ranks
from soak.records import resources

SAMPLES, FEWEST = 200, 8
REMADE = ("plain DDP", "8 bits, feedback, overlap")
MEMORY = {"heap": 64.0, "resident": 1024.0}
ALLOWED = {**MEMORY, "kernel_threads": 0.0, "descriptors": 0.0, "seconds": 0.0}
"""What is compared, and how much may be more at the end than at the beginning."""


class Line(NamedTuple):
    """A regression line through equidistant values.

    Args:
        growth: Growth from the first to the last value, along the line.
        error: Standard error of the growth.
    """

    growth: float
    error: float


def fit_line(values: Sequence[float]) -> Line:
    """Fit a line by least squares.

    Consecutive values resemble each other, which would make the error look small, so the line is fitted to
    the means of twenty blocks.
    """
    size = max(1, len(values) // 20)
    blocks = [fmean(values[start : start + size]) for start in range(0, len(values) - size + 1, size)]
    places = range(len(blocks))
    slope, first = linear_regression(places, blocks)
    rest = sum((value - first - slope * place) ** 2 for place, value in zip(places, blocks, strict=True))
    spread = sum((place - fmean(places)) ** 2 for place in places)
    error = math.sqrt(rest / max(1, len(blocks) - 2) / spread)
    return Line(slope * places[-1], error * places[-1])


def judge_growth(
    ranks: list[list[dict[str, float]]], control: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return each quantity's growth on the rank where it is largest, and the verdict.

    The first quarter is left out: caches fill, residuals and optimizer states appear, a state chooses.

    Args:
        ranks: The samples of each rank.
        control: The outcome of a loop without our packages: memory may grow as much as there.
    """
    found: dict[str, Any] = {}
    problems = []
    for what, allowed in ALLOWED.items():
        if what not in ranks[0][0]:
            continue
        lines = [fit_line([sample[what] for sample in rank[len(rank) // 4 :]]) for rank in ranks]
        worst = max(lines, key=lambda line: line.growth)
        found[what] = {name: round(value, 6) for name, value in worst._asdict().items()}
        growth, error = worst.growth, worst.error
        if control and what in MEMORY:
            growth -= control[what]["growth"]
            error = math.hypot(error, control[what]["error"])
        if growth > max(3 * error, allowed):
            problems.append(f"{what} grow by {growth:.4g} (error {error:.2g})")
    return {**found, "verdict": "wrong" if problems else "right", "problems": problems}


def measure_growth(options: Any) -> Iterator[dict[str, Any]]:
    """Run loops for as many steps as the options say, and yield each outcome.

    The first of each kind has none of our hooks: what torch and the loop leave behind is allowed for the
    others.

    Args:
        options: Of the command line.
    """
    names = ["plain DDP", *(name for name in TRAININGS if name not in BASELINES)]
    steps = {name: partial(go_on, name) for name in names}
    groups = {f"process groups made and destroyed, {name}": partial(_jobs, name) for name in REMADE}
    models = {f"models made anew, {name}": partial(remake, name) for name in REMADE}
    few = options.steps // 100
    for count, loops in ((options.steps, steps), (few, groups), (few, models)):
        if count < FEWEST:
            continue
        control = None
        for what, make in loops.items():
            began = time.monotonic()
            size = max(TRAININGS[what].world_sizes) if what in TRAININGS else 2
            samples = run_ranks(sample_loop, size, make, count, timeout=120 + 2 * count)
            outcome = judge_growth(samples, control)
            if control is None:
                control, outcome = outcome, {**outcome, "verdict": "torch's own", "problems": []}
            took = round(time.monotonic() - began, 1)
            yield {"what": what, "count": count, "world_size": size, **outcome, "took": took}


def sample_loop(rank: int, make: Callable[[], Callable[[int], object]], count: int) -> list[dict[str, float]]:
    """Run a loop on a rank; return what the process holds, in samples.

    Args:
        rank: Its number.
        make: Returns what is called in the loop, with numbers.
        count: How often.
    """
    del rank
    one, every = make(), max(1, count // SAMPLES)
    names = [*resources(), "seconds"]
    # Allocated before, so that samples take no memory.
    samples = torch.full((count // every, len(names)), -1.0, dtype=torch.float64)
    for row in range(len(samples)):
        began = time.perf_counter()
        for number in range(every):
            one(every * row + number)
        gc.collect()
        seconds = (time.perf_counter() - began) / every
        samples[row] = torch.tensor([*resources().values(), seconds], dtype=torch.float64)
    if not dist.is_initialized():
        dist.init_process_group("gloo")  # run_ranks expects one
    return [dict(zip(names, row, strict=True)) for row in samples.tolist()]


def go_on(training: str) -> Callable[[int], object]:
    """Return what makes a step of a training."""
    return TRAININGS[training].begin(resolve_group(), Places()).step


def _train_and_close(training: str) -> None:
    part = TRAININGS[training].begin(resolve_group(), Places()).train(range(3))
    dist.barrier()
    part.close()


def remake(training: str) -> Callable[[int], object]:
    """Return what makes a training anew and closes it, in a group that stays."""
    return lambda _: _train_and_close(training)


def _jobs(training: str) -> Callable[[int], object]:
    dist.destroy_process_group()  # the one that run_ranks made
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)

    def one(number: int) -> None:
        store = dist.PrefixStore(f"group {number}", server)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        _train_and_close(training)
        dist.destroy_process_group()

    return one
