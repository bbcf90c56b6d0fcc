"""Losses of training with weights that are rounded to 8 bits when they are gathered, from exact shards.

    python benchmarks/bench_fsdp_gather_losses.py

A character transformer of 0.25 million parameters, whose weights are rounded as ``quantize_all_gather`` does
among four ranks, forward and backward; AdamW updates the exact ones. From scratch, and fine-tuning with two
learning rates after a common beginning. "Seen" is the held-out loss with the rounded weights, "saved" that of
the exact ones, as a checkpoint has them. bf16 shows what another rounding does. One process, one thread.
Writes results/fsdp_gather_losses.json.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from harness import Benchmark, Found
from tasks import Language
from torch import nn

from ddp_quant_hooks.fsdp.gather_plan import shard_format
from ddp_quant_hooks.kernels import Layout

SHARDS, LAYOUT = 4, Layout("int8", 128, rotate=True)
SEEDS = (0, 1, 2)
STEPS, BEFORE, TUNING = 300, 300, 150
RATES = (1e-4, 1e-3)
WEIGHTS = ("fp32", "bf16", "8 bits")


def rounded(parameter: torch.Tensor, weights: str) -> torch.Tensor:
    """Return what ranks compute with."""
    if weights == "fp32":
        return parameter.clone()
    if weights == "bf16":
        return parameter.bfloat16().float()
    if parameter.dim() <= 1:
        return parameter.clone()
    found = []
    for shard in parameter.chunk(SHARDS):
        form = shard_format(((shard.numel(), False),), LAYOUT, 4)
        message, values = torch.empty(form.message_bytes, dtype=torch.uint8), torch.empty(shard.numel())
        form.encode(shard.flatten(), message)
        form.decode(message, (0,), values)
        found.append(values.view_as(shard))
    return torch.cat(found)


@contextlib.contextmanager
def gathered(model: nn.Module, weights: str) -> Iterator[None]:
    """Let a model have rounded weights meanwhile."""
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), exact, strict=True):
            parameter.copy_(rounded(value, weights))
    yield
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), exact, strict=True):
            parameter.copy_(value)


def train(task: Language, model: nn.Module, weights: str, seed: int, steps: int, rate: float | None) -> None:
    """Train a model."""
    optimizer = task.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = rate or group["lr"]
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        with gathered(model, weights):
            task.loss(model, task.draw(SHARDS * task.batch, batches)).backward()
        optimizer.step()


def figures(task: Language, model: nn.Module, weights: str) -> dict[str, float]:
    """Return the held-out losses."""
    with torch.no_grad():
        saved = task.evaluate(model)["loss"]
        with gathered(model, weights):
            return {"seen": task.evaluate(model)["loss"], "saved": saved}


def runs(task: Language, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the losses of all kinds of training with one seed."""
    torch.manual_seed(seed)
    start = task.model()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for weights in WEIGHTS:
        model = copy.deepcopy(start)
        train(task, model, weights, seed, STEPS, None)
        found.setdefault("from scratch", {})[weights] = figures(task, model, weights)
    base = copy.deepcopy(start)
    train(task, base, "fp32", 100 + seed, BEFORE, None)
    for rate in RATES:
        for weights in WEIGHTS:
            model = copy.deepcopy(base)
            train(task, model, weights, 200 + seed, TUNING, rate)
            found.setdefault(f"tuning, rate {rate:g}", {})[weights] = figures(task, model, weights)
    return found


def losses(_: Namespace) -> Iterator[Found]:
    """Train with all seeds; store losses, and differences to fp32 with the same seed."""
    torch.set_num_threads(1)
    task = Language()
    of_seeds = [runs(task, seed) for seed in SEEDS]
    for kind in of_seeds[0]:
        entry: dict[str, Any] = {}
        for weights in WEIGHTS:
            row: dict[str, Any] = {}
            for what in ("seen", "saved"):
                values = [found[kind][weights][what] for found in of_seeds]
                plain = [found[kind]["fp32"]["saved"] for found in of_seeds]
                differences = [value - other for value, other in zip(values, plain, strict=True)]
                row[what] = [round(value, 5) for value in values]
                row[f"{what}, minus fp32"] = [round(value, 5) for value in differences]
                row[f"{what}, mean difference"] = round(statistics.fmean(differences), 5)
            entry[weights] = row
            print(f"{kind:<22}{weights:<8}{row}", flush=True)
        yield ("losses", kind), entry


def main() -> None:
    """Train, print and store."""
    facts = {"seeds": SEEDS, "steps": STEPS, "steps_before_tuning": BEFORE, "steps_of_tuning": TUNING}
    Benchmark(__file__, __doc__).run({"losses": losses}, facts=lambda _: facts)


if __name__ == "__main__":
    main()
