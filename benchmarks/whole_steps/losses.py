"""Losses with each number format on the wire: after equal steps, and after equal time."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bench_diloco import CONFIGURATIONS, outer_optimizers
from bench_quant_convergence import Task
from machine import describe_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from whole_steps.ranks import keep_freed_memory
from whole_steps.sides import LABELS, OVERLAP, PLAIN, make_side
from whole_steps.tasks import MODELS

from ddp_quant_hooks import QuantizedAllreduceState
from dist_utils.testing import run_ranks

RANKS, HOW_LONG, THIN, WARM_UP = 2, 200, 10, 20
"""Ranks, steps, steps per point of a curve, steps in which the learning rate rises."""
DILOCO = "diloco"
LEARNERS = [PLAIN, "fp16", "bf16", "8bits", "4bits", "powersgd-one", "perchannel", DILOCO]
LEARNT = ("7M", "conv")
LABEL = {**LABELS, DILOCO: "DiLoCo, 8 bits every 20 steps"}


def learn(rank: int, model_name: str, name: str, seeds: int, steps: int) -> list[list[float]]:
    """Train on one rank; return the mean losses of every THIN steps, for each seed."""
    torch.set_num_threads(1)
    keep_freed_memory()
    task = MODELS[model_name].task()
    return [_curve(rank, task, model_name, name, seed, steps) for seed in range(seeds)]


def _curve(rank: int, task: Task, model_name: str, name: str, seed: int, steps: int) -> list[float]:
    step, optimizer, close = _diloco(task, seed) if name == DILOCO else _hooked(task, model_name, name, seed)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=WARM_UP)
    batches = torch.Generator().manual_seed(seed)
    losses = torch.empty(steps)
    for index in range(steps):
        # Every rank draws for all ranks, so the examples do not depend on who computes them.
        losses[index] = step(task.draw(RANKS * task.batch, batches).view(RANKS, -1)[rank])
        schedule.step()
    dist.all_reduce(losses)
    close()
    return [round(value, 6) for value in (losses / RANKS).view(-1, THIN).mean(1).tolist()]


Learner = tuple[Callable[[torch.Tensor], torch.Tensor], torch.optim.Optimizer, Callable[[], None]]


def _hooked(task: Task, model_name: str, name: str, seed: int) -> Learner:
    side = make_side(name, MODELS[model_name], task, seed=seed)
    return lambda examples: side.step(task, examples), side.optimizer, side.close


def _diloco(task: Task, seed: int) -> Learner:
    torch.manual_seed(seed)
    model: nn.Module | DistributedDataParallel = task.model()
    configuration = CONFIGURATIONS["int8, feedback"]
    state = QuantizedAllreduceState(**(configuration.options or {}))
    outer = outer_optimizers(model, configuration, state)
    inner = task.optimizer(model.parameters())

    def step(examples: torch.Tensor) -> torch.Tensor:
        inner.zero_grad()
        loss = task.loss(model, examples)
        torch.autograd.backward(loss)
        inner.step()
        for fragment in outer:
            fragment.step()
        return loss.detach()

    def close() -> None:
        for fragment in outer:
            fragment.finish()
        state.close()

    return step, inner, close


def learn_all(options: argparse.Namespace, results: dict[str, Any], save: Callable[[], None]) -> None:
    """Train with every requested side, and write the curves."""
    wanted = [name for name in LEARNERS if name in options.sides]
    for model in [model for model in LEARNT if model in options.models]:
        entry = results.setdefault("losses", {}).setdefault(model, {})
        if (entry.get("steps"), entry.get("seeds")) != (options.steps, options.seeds):
            entry["curves"] = {}  # curves of different lengths are not compared
        entry |= {
            **describe_machine(),
            "steps": options.steps,
            "seeds": options.seeds,
            "steps_in_a_point": THIN,
        }
        for name in wanted:
            timeout = 120 + 5 * options.seeds * options.steps * MODELS[model].step_seconds
            try:
                curves, *_ = run_ranks(
                    learn, RANKS, model, name, options.seeds, options.steps, timeout=timeout
                )
            except Exception as error:  # noqa: BLE001 - the table shows the errors of PyTorch's hooks
                entry["curves"][name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
                print(f"{model}: {LABEL[name]}: {entry['curves'][name]['failed']}", file=sys.stderr)
            else:
                entry["curves"][name] = curves
                final = [curve[-1] for curve in curves]
                print(f"{model}: {LABEL[name]:<44}{statistics.fmean(final):8.4f} {final}", flush=True)
            save()


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
