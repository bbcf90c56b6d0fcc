"""Losses of whole trainings with each number format on the wire, after equal steps and after equal time."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import memory
import torch
from bench_diloco import CONFIGURATIONS, outer_optimizers
from emulated_hosts import EmulationUnavailableError
from harness import Found
from machine import describe_machine, describe_tree
from rank_processes import on_ranks
from tasks import MODELS, Task
from training import means, take_step, train
from whole_steps.cells import Cell
from whole_steps.sides import LABELS, LOW_RANK, LOW_RANK_WARM_UP, OVERLAP, PLAIN, label, make_side

from ddp_quant_hooks import QuantizedAllreduceState

RANKS, RATE = 2, "1gbit"
"""One rank on each of the emulated hosts, and the rate of their links: see :func:`place_of`."""
HOW_LONG, THIN, WARM_UP, AVERAGED = 200, 10, 20, 50
"""Steps, steps in a point of a curve, in which the learning rate rises, in a loss after equal time."""
DILOCO = "diloco"
OVERLAPPED = "8bits" + OVERLAP
FEW_BITS = ["8bits", OVERLAPPED, "4bits", "4bits-none"]
POWER_SGD = ["powersgd-one", "powersgd4-one"]
RANKS_OF_FACTORS = [name for name in LOW_RANK if not name.endswith("-one")]
LEARNERS = [PLAIN, "fp16", "bf16", *FEW_BITS, *RANKS_OF_FACTORS, *POWER_SGD, DILOCO]
LEARNT = ("7M", "7M by SGD", "conv")
LABEL = {**LABELS, OVERLAPPED: label(OVERLAPPED), DILOCO: "DiLoCo, 8 bits every 20 steps"}

Learner = tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer, Callable[[], None]]
"""A step, the optimizer, and how to end."""
Curve = dict[str, list[float]]
"""The mean ``losses`` of every THIN steps."""


def place_of(model: str) -> str:
    """Return a model and where it trains, in the words of the cells."""
    return Cell(model, RANKS, RATE).name


def learn(rank: int, model_name: str, name: str, seeds: int, steps: int) -> list[Curve]:  # noqa: ARG001
    """Train on one rank, once for each seed; return the curves."""
    memory.keep_freed_memory()
    task = MODELS[model_name].task()
    return [_curve(task, model_name, name, seed, steps) for seed in range(seeds)]


def _curve(task: Task, model_name: str, name: str, seed: int, steps: int) -> Curve:
    full_steps = full_steps_of(steps)
    take, optimizer, close = (
        _diloco(task, seed) if name == DILOCO else _hooked(task, model_name, name, seed, full_steps)
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=WARM_UP)

    def step(chosen: torch.Tensor) -> torch.Tensor:
        loss = take(chosen)
        schedule.step()
        return loss

    losses = train(task, step, seed, steps)
    close()
    return {"losses": [round(value, 6) for value in means(losses, THIN)]}


def _hooked(task: Task, model_name: str, name: str, seed: int, full_steps: int) -> Learner:
    side = make_side(name, MODELS[model_name], task, seed=seed, full_steps=full_steps)
    return lambda chosen: side.step(task, chosen), side.optimizer, side.close


def _diloco(task: Task, seed: int) -> Learner:
    torch.manual_seed(seed)
    model = task.model()
    configuration = CONFIGURATIONS["int8, feedback"]
    state = QuantizedAllreduceState(**(configuration.options or {}))
    outer = outer_optimizers(model, configuration, state)
    inner = task.optimizer(model.parameters())

    def step(chosen: torch.Tensor) -> torch.Tensor:
        loss = take_step(task, model, inner, chosen)
        for fragment in outer:
            fragment.step()
        return loss

    def close() -> None:
        for fragment in outer:
            fragment.finish()
        state.close()

    return step, inner, close


def learn_all(options: Namespace) -> Iterator[Found]:
    """Train with every requested side, and yield a model's curves after each."""
    for model in [model for model in LEARNT if model in options.models]:
        curves: dict[str, Any] = {}
        about = {"steps": options.steps, "seeds": options.seeds, "where": place_of(model)}
        about |= {**describe_machine(), "tree": describe_tree()}
        for name in [name for name in LEARNERS if name in options.sides]:
            timeout = 120 + 20 * options.seeds * options.steps * MODELS[model].step_seconds
            wanted = (model, name, options.seeds, options.steps)
            try:
                curves[name], *_ = on_ranks(learn, RANKS, *wanted, rate=RATE, timeout=timeout)
            except EmulationUnavailableError as error:
                print(f"SKIPPED losses: {error}", file=sys.stderr)
                return
            except Exception as error:  # noqa: BLE001 - the table shows the errors of PyTorch's hooks
                curves[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(f"{model}: {LABEL[name]}: {curves[name]['failed']}", file=sys.stderr)
            else:
                final = [curve["losses"][-1] for curve in curves[name]]
                print(f"{model}: {LABEL[name]:<44}{statistics.fmean(final):8.4f} {final}", flush=True)
            yield ("losses", model), {"curves": curves, **about}


def curve_of(name: str) -> str:
    """Return the side whose curve a side has: one bucket of low rank has other blocks of the same values."""
    return name.removesuffix("-one") if name in LOW_RANK else name


def seconds_of_steps(name: str, sides: dict[str, Any], steps: int) -> list[float]:
    """Return when each step of a training ends, by the medians of a cell's sides; nothing without them."""
    first, count = first_steps(name, steps)
    first = first if first in sides else "8bits"  # 4 bits were not measured everywhere
    medians = [sides.get(side, {}).get("median_ms") for side in (first, name)]
    if None in medians:
        return []
    before, after = medians
    return [*accumulate(1e-3 * (before if step < count else after) for step in range(steps))]


def first_steps(name: str, steps: int) -> tuple[str, int]:
    """Return the side as which a side begins a training of so many steps, and for how many of them."""
    if name in POWER_SGD:
        return PLAIN, full_steps_of(steps)
    return ("4bits", LOW_RANK_WARM_UP) if name in LOW_RANK else (name, 0)


def full_steps_of(steps: int) -> int:
    """Return how many first steps of a training PowerSGD makes with full gradients, as PyTorch advises."""
    return max(WARM_UP, steps // 10)


def complete(entry: dict[str, Any]) -> dict[str, list[Curve]]:
    """Return the curves of a model that did not fail."""
    return {name: curves for name, curves in entry["curves"].items() if isinstance(curves, list)}
