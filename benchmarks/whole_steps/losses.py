"""Losses with each number format on the wire: after equal steps, and after equal time."""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import memory
import torch
from bench_diloco import CONFIGURATIONS, outer_optimizers
from harness import Found
from machine import describe_machine
from tasks import MODELS, Task
from training import means, take_step, train
from whole_steps.sides import LABELS, OVERLAP, PLAIN, make_side

from ddp_quant_hooks import QuantizedAllreduceState
from dist_utils.testing import run_ranks

RANKS, HOW_LONG, THIN, WARM_UP = 2, 200, 10, 20
"""Ranks, steps, steps per point of a curve, steps in which the learning rate rises."""
DILOCO = "diloco"
LEARNERS = [PLAIN, "fp16", "bf16", "8bits", "4bits", "powersgd-one", "powersgd4-one", "perchannel", DILOCO]
LEARNT = ("7M", "conv")
LABEL = {**LABELS, DILOCO: "DiLoCo, 8 bits every 20 steps"}

Learner = tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer, Callable[[], None]]
"""A step, the optimizer, and how to end."""


def learn(rank: int, model_name: str, name: str, seeds: int, steps: int) -> list[list[float]]:  # noqa: ARG001
    """Train on one rank; return the mean losses of every THIN steps, for each seed."""
    memory.keep_freed_memory()
    task = MODELS[model_name].task()
    return [_curve(task, model_name, name, seed, steps) for seed in range(seeds)]


def _curve(task: Task, model_name: str, name: str, seed: int, steps: int) -> list[float]:
    take, optimizer, close = _diloco(task, seed) if name == DILOCO else _hooked(task, model_name, name, seed)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=WARM_UP)

    def step(chosen: torch.Tensor) -> torch.Tensor:
        loss = take(chosen)
        schedule.step()
        return loss

    losses = train(task, step, seed, steps)
    close()
    return [round(value, 6) for value in means(losses, THIN)]


def _hooked(task: Task, model_name: str, name: str, seed: int) -> Learner:
    side = make_side(name, MODELS[model_name], task, seed=seed)
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
        about = {"steps": options.steps, "seeds": options.seeds, "steps_in_a_point": THIN}
        curves: dict[str, Any] = {}
        for name in [name for name in LEARNERS if name in options.sides]:
            timeout = 120 + 5 * options.seeds * options.steps * MODELS[model].step_seconds
            wanted = (model, name, options.seeds, options.steps)
            try:
                curves[name], *_ = run_ranks(learn, RANKS, *wanted, timeout=timeout)
            except Exception as error:  # noqa: BLE001 - the table shows the errors of PyTorch's hooks
                curves[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(f"{model}: {LABEL[name]}: {curves[name]['failed']}", file=sys.stderr)
            else:
                final = [curve[-1] for curve in curves[name]]
                print(f"{model}: {LABEL[name]:<44}{statistics.fmean(final):8.4f} {final}", flush=True)
            yield ("losses", model), {"curves": curves, **describe_machine(), **about}


def loss_at(curve: list[float], step: float) -> float:
    """Return a curve's value after a number of steps, linearly interpolated."""
    # A point is a mean of THIN steps, and stands for their middle.
    place = min(max((step - THIN / 2) / THIN, 0.0), len(curve) - 1.0)
    low = int(place)
    high = min(low + 1, len(curve) - 1)
    return curve[low] + (place - low) * (curve[high] - curve[low])


def losses_in_time(entry: dict[str, Any], cell: dict[str, Any]) -> tuple[float, dict[str, list[float]]]:
    """Return the seconds that the fastest side needs for its curve, and every side's losses by then.

    Args:
        entry: The curves of a model.
        cell: Its step times in one cell. An overlapped side uses the curve of its plain counterpart.
    """
    curves = {
        name: entry["curves"].get(name.removesuffix(OVERLAP))
        for name, side in cell["sides"].items()
        if "median_ms" in side
    }
    known = {name: curve for name, curve in curves.items() if isinstance(curve, list)}
    seconds = entry["steps"] * min(cell["sides"][name]["median_ms"] for name in known) / 1e3
    return seconds, {
        name: [loss_at(curve, 1e3 * seconds / cell["sides"][name]["median_ms"]) for curve in curves]
        for name, curves in known.items()
    }
