"""Training of a task on several ranks, and comparisons of final losses over seeds.

A seed fixes the initial parameters and all batches: runs of one seed differ only in how ranks average.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tasks import Task
from torch import nn

REFERENCE = "fp32"


def take_step(
    task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: torch.Tensor
) -> torch.Tensor:
    """Train a model with these examples; return the loss."""
    optimizer.zero_grad()
    loss = task.loss(model, chosen)
    torch.autograd.backward(loss)
    optimizer.step()
    return loss.detach()


def train(task: Task, step: Callable[[torch.Tensor], torch.Tensor], seed: int, steps: int) -> list[float]:
    """Train with this rank's part of every batch; return the ranks' mean loss of every step.

    Args:
        task: Draws the examples.
        step: Trains with the examples and returns the loss.
        seed: Of the batches.
        steps: How many.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = torch.Generator().manual_seed(seed)
    losses = torch.empty(steps)
    for index in range(steps):
        # Every rank draws for all ranks, so the examples of a step do not depend on who computes them.
        losses[index] = step(task.draw(world_size * task.batch, batches).view(world_size, -1)[rank])
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


def held_out(task: Task, model: nn.Module) -> dict[str, float]:
    """Return the task's figures for a model on rank 0, nothing on the others."""
    if dist.get_rank() > 0:
        return {}
    with torch.no_grad():
        return task.evaluate(model)


def means(curve: Sequence[float], width: int) -> list[float]:
    """Return the means of every ``width`` points."""
    return [statistics.fmean(curve[end - width : end]) for end in range(width, len(curve) + 1, width)]


def mean_curve(curves: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean of curves, point by point."""
    return [_rounded(statistics.fmean(point)) for point in zip(*curves, strict=True)]


def deviation(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds; ``None`` for one seed."""
    return statistics.stdev(values) if len(values) > 1 else None


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, range and all values."""
    return {
        "mean": _rounded(statistics.fmean(values)),
        "range": [_rounded(min(values)), _rounded(max(values))],
        "by_seed": [_rounded(value) for value in values],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def against_reference(
    losses: Sequence[float], reference: Sequence[float], spread: float | None
) -> dict[str, Any]:
    """Return the differences of final losses, one per seed, and what they say.

    The verdict compares their mean with the standard deviation of the reference's own losses over the seeds,
    which is the effect of the seed alone. Three seeds say little about a deviation, so it also says whether
    all seeds agree on the sign.

    Args:
        losses: Of each seed.
        reference: In fp32, of the same seeds.
        spread: The standard deviation of fp32's losses over seeds.
    """
    differences = [loss - plain for loss, plain in zip(losses, reference, strict=True)]
    mean = statistics.fmean(differences)
    if not math.isfinite(mean):
        verdict = "not finite"
    elif spread is None:
        verdict = "one seed: no spread to compare with"
    else:
        agree = len({difference > 0 for difference in differences}) == 1
        size = "within" if abs(mean) < spread else "beyond"
        direction = "higher" if mean > 0 else "lower"
        verdict = f"{size} fp32's spread, {direction} ({'all seeds' if agree else 'mixed'})"
    return {"difference_to_fp32": over_seeds(differences), "verdict": verdict}


def print_losses(title: str, spread: float | None, rows: dict[str, Any], loss: str) -> None:
    """Print a table of final losses.

    Args:
        title: Of the table.
        spread: The standard deviation of fp32's losses over seeds.
        rows: The entries of the result file by configuration.
        loss: The key of the losses in an entry.
    """
    print(f"\n{title}; standard deviation of fp32's loss over seeds: {spread and format(spread, '.2e')}")
    for name, entry in rows.items():
        line = f"  {name:<26}{_text(entry[loss], '.4f'):<28}"
        if "verdict" in entry:
            line += f"minus fp32 {_text(entry['difference_to_fp32'], '+.1e'):<32}{entry['verdict']}; "
        scalars = {key: value for key, value in entry.items() if isinstance(value, (int, float))}
        print(line + ", ".join(f"{key} {value}" for key, value in scalars.items()), flush=True)


def _text(summary: dict[str, Any], form: str) -> str:
    low, high = summary["range"]
    return f"{summary['mean']:{form}} [{low:{form}}, {high:{form}}]"
