"""Losses of training with weights that are rounded to 8 bits when they are gathered, from exact shards.

    python benchmarks/bench_fsdp_gather_losses.py

A character transformer of 0.25 million parameters, whose weights are rounded as ``quantize_all_gather`` does
among four ranks, forward and backward; AdamW updates the exact ones. From scratch, and fine-tuning with two
learning rates after a common beginning. "Seen" is the held-out loss with the rounded weights, "saved" that of
the exact ones, as a checkpoint has them. bf16 shows what another rounding does, "differences" are those of
``differences=True``; each parameter's shard that is too far from its copy is sent as it is. One process, one
thread. Writes results/fsdp_gather_losses.json.
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

from ddp_quant_hooks.fsdp.differences import encode_difference
from ddp_quant_hooks.fsdp.gather_plan import shard_format
from ddp_quant_hooks.kernels import Layout

SHARDS, LAYOUT = 4, Layout("int8", 128, rotate=True)
OF_DIFFERENCES = Layout("int4", 32, rotate=True)
SEEDS = (0, 1, 2)
STEPS, BEFORE, TUNING = 300, 300, 150
RATES = (1e-4, 1e-3)
WEIGHTS = ("fp32", "bf16", "8 bits", "differences")


class Gathers:
    """What ranks compute with, gather after gather.

    Args:
        weights: How weights are rounded.
    """

    def __init__(self, weights: str) -> None:
        self._weights = weights
        self._copies: dict[tuple[int, int], torch.Tensor] = {}

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Let a model have the gathered weights meanwhile."""
        exact = [parameter.detach().clone() for parameter in model.parameters()]
        with torch.no_grad():
            for number, (parameter, value) in enumerate(zip(model.parameters(), exact, strict=True)):
                parameter.copy_(self._rounded(number, value))
        yield
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), exact, strict=True):
                parameter.copy_(value)

    def _rounded(self, number: int, parameter: torch.Tensor) -> torch.Tensor:
        if self._weights == "bf16":
            return parameter.bfloat16().float()
        if self._weights == "fp32" or parameter.dim() <= 1:
            return parameter
        rounding = self._follow if self._weights == "differences" else _in_eight_bits
        shards = [
            rounding((number, rank), shard.flatten()) for rank, shard in enumerate(parameter.chunk(SHARDS))
        ]
        return torch.cat(shards).view_as(parameter)

    def _follow(self, key: tuple[int, int], shard: torch.Tensor) -> torch.Tensor:
        form = shard_format(((shard.numel(), False),), OF_DIFFERENCES, 4)
        known = key in self._copies
        copied = self._copies.setdefault(key, torch.zeros_like(shard))
        message = torch.empty(form.message_bytes, dtype=torch.uint8)
        if not encode_difference(form, [shard.numel()], shard, copied, message) or not known:
            copied.copy_(shard)
        return copied


def _in_eight_bits(_: tuple[int, int], shard: torch.Tensor) -> torch.Tensor:
    form = shard_format(((shard.numel(), False),), LAYOUT, 4)
    message, values = torch.empty(form.message_bytes, dtype=torch.uint8), torch.empty(shard.numel())
    form.encode(shard, message)
    form.decode(message, (0,), values)
    return values


def train(
    task: Language, model: nn.Module, gathers: Gathers, seed: int, steps: int, rate: float | None
) -> None:
    """Train a model."""
    optimizer = task.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = rate or group["lr"]
    batches = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        with gathers.of(model):
            task.loss(model, task.draw(SHARDS * task.batch, batches)).backward()
        optimizer.step()


def figures(task: Language, model: nn.Module, gathers: Gathers) -> dict[str, float]:
    """Return the held-out losses."""
    with torch.no_grad():
        saved = task.evaluate(model)["loss"]
        with gathers.of(model):
            return {"seen": task.evaluate(model)["loss"], "saved": saved}


def runs(task: Language, seed: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the losses of all kinds of training with one seed."""
    torch.manual_seed(seed)
    start = task.model()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for weights in WEIGHTS:
        model, gathers = copy.deepcopy(start), Gathers(weights)
        train(task, model, gathers, seed, STEPS, None)
        found.setdefault("from scratch", {})[weights] = figures(task, model, gathers)
    base = copy.deepcopy(start)
    train(task, base, Gathers("fp32"), 100 + seed, BEFORE, None)
    for rate in RATES:
        for weights in WEIGHTS:
            model, gathers = copy.deepcopy(base), Gathers(weights)
            train(task, model, gathers, 200 + seed, TUNING, rate)
            found.setdefault(f"tuning, rate {rate:g}", {})[weights] = figures(task, model, gathers)
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


if __name__ == "__main__":
    facts = {"seeds": SEEDS, "steps": STEPS, "steps_before_tuning": BEFORE, "steps_of_tuning": TUNING}
    Benchmark(__file__, __doc__).run({"losses": losses}, facts=facts)
