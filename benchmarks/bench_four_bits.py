"""The cost of few bits for a training step and its causes, and the errors of biases and norms.

    python benchmarks/bench_four_bits.py           # minutes, one thread, no network; needs scikit-learn
    python benchmarks/bench_four_bits.py language --steps 60 --seeds 1

The tasks are those of bench_quant_convergence.py: a language model with AdamW, and a convolutional network
with SGD. Four ranks are simulated in one process, with the hooks' kernels (bench_quant_accuracy.Simulation).

A final loss hides small effects: any rounding sends training along another path, and two paths end some
thousandths apart. So here every scheme gets the same gradients, those of training in fp32, and keeps an
optimizer's moments of its own averages. The *progress* of the step that it would make is its product with the
gradient of a large batch, relative to that of fp32's step: 0.98 is a step that gains 98 % as much.

"With exact squares" is AdamW's step with the first moment from the scheme's averages and the second from
exact ones: a loss that remains there is not caused by the second moment, which noise raises.

The other columns are errors of the averages, for parameters of at most one dimension (biases, norms) and for
the rest: as the hook sends them, and with ``exact_1d``.

Writes results/four_bits.json.
"""

from __future__ import annotations

import itertools
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from bench_quant_accuracy import Simulation
from harness import Benchmark, Found
from tasks import TASKS, Task
from torch import nn
from training import over_seeds

from ddp_quant_hooks.kernels import Layout

RANKS = 4
LARGE_BATCH = 32
"""Size of the large batch for measuring progress, in multiples of a rank's batch."""
EVERY = 20
"""Steps between two measurements."""
EXACT_SQUARES = "with exact squares"
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8
"""Torch's defaults for AdamW."""

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"error_feedback": "none"},
    "int8, exact_1d": {"error_feedback": "none", "exact_1d": True},
    'int8, feedback "shard"': {"error_feedback": "shard"},
    'int4, feedback "both"': {"bits": 4, "error_feedback": "both"},
    'int4, feedback "shard"': {"bits": 4, "error_feedback": "shard"},
    'int4, feedback "none"': {"bits": 4, "error_feedback": "none"},
    'int4, feedback "none", exact_1d': {"bits": 4, "error_feedback": "none", "exact_1d": True},
    'int4, gather="int8", feedback "both"': {"bits": 4, "gather": "int8", "error_feedback": "both"},
    'int4, gather="int8", feedback "none"': {"bits": 4, "gather": "int8", "error_feedback": "none"},
    'int4, gather="int8", blocks of 64': {
        "bits": 4, "gather": "int8", "error_feedback": "none", "block_size": 64,
    },
    "int4, blocks of 64": {"bits": 4, "block_size": 64, "error_feedback": "none"},
    "int4, blocks of 128": {"bits": 4, "block_size": 128, "error_feedback": "none"},
}  # fmt: skip


class Averaging:
    """A scheme's averages of one model's gradients, step by step.

    Args:
        options: Options of a state.
        small: Marks the values of parameters with at most one dimension.
    """

    def __init__(self, options: dict[str, Any], small: torch.Tensor) -> None:
        bits = options.get("bits", 8)
        block = options.get("block_size", 128 if bits == 8 else 32)
        scatter = Layout(f"int{bits}", block, rotate=True)
        gather = Layout(options.get("gather", scatter.format), block, rotate=True)
        count, exact = len(small), options.get("exact_1d", False)
        self._exact = small if exact else None
        self._ranks = Simulation(RANKS, count, scatter, gather, options["error_feedback"])
        sent = scatter.message_bytes(count) + gather.message_bytes(count)
        sent += 8 * int(small.sum()) if exact else 0
        self.bytes_ratio = sent / (8 * count)
        """The bytes sent, as a share of a ring all-reduce in fp32."""

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the average that every rank gets; ``gradients`` has one row per rank."""
        if self._exact is None:
            return self._ranks.average(gradients)
        rest = gradients.masked_fill(self._exact, 0.0)
        return torch.where(self._exact, gradients.mean(0), self._ranks.average(rest))


class Step:
    """The step that an optimizer computes from averages, without its learning rate."""

    def __init__(self, count: int, *, adam: bool) -> None:
        self._first, self._second, self._adam = torch.zeros(count), torch.zeros(count), adam
        self._steps = 0

    def take(self, values: torch.Tensor, squares_of: torch.Tensor) -> torch.Tensor:
        """Return the step for ``values``, with the second moment from ``squares_of``."""
        self._steps += 1
        if not self._adam:
            self._first.mul_(BETA1).add_(values)
            return self._first
        self._first.lerp_(values, 1 - BETA1)
        self._second.mul_(BETA2).addcmul_(squares_of, squares_of, value=1 - BETA2)
        scale = math.sqrt(1 - BETA2**self._steps) / (1 - BETA1**self._steps)
        return scale * self._first / (self._second.sqrt() + EPSILON)


@dataclass(frozen=True)
class Moment:
    """One step of training in fp32.

    Args:
        gradients: The ranks' gradients, one per row.
        mean: The mean of the rows.
        large: The gradient of a large batch, in some steps.
    """

    gradients: torch.Tensor
    mean: torch.Tensor
    large: torch.Tensor | None


def training(task: Task, model: nn.Module, *, seed: int, steps: int) -> Iterator[Moment]:
    """Train the model in fp32; yield every step before it is taken."""
    parameters = list(model.parameters())
    optimizer = task.optimizer(parameters)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    batches, others = (torch.Generator().manual_seed(number) for number in (seed, seed + 10**6))

    def gradient(chosen: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(task.loss(model, chosen), parameters)
        return torch.cat([part.flatten() for part in reversed(found)])  # as in DDP's first bucket

    for step in range(steps):
        chosen = task.draw(RANKS * task.batch, batches).view(RANKS, task.batch)
        gradients = torch.stack([gradient(mine) for mine in chosen])
        mean = gradients.mean(0)
        measured = step >= steps // 5 and step % EVERY == 0
        large = gradient(task.draw(LARGE_BATCH * task.batch, others)) if measured else None
        yield Moment(gradients, mean, large)
        parts = torch.split(mean, [parameter.numel() for parameter in reversed(parameters)])
        for parameter, part in zip(reversed(parameters), parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        optimizer.step()
        schedule.step()


class Progress:
    """The progress of one scheme's steps, summed over the measurements.

    Args:
        averaging: The scheme.
        count: Number of values.
        adam: Whether the optimizer is AdamW.
    """

    def __init__(self, averaging: Averaging, count: int, *, adam: bool) -> None:
        self.averaging = averaging
        names = ("progress", EXACT_SQUARES) if adam else ("progress",)
        self._steps = {name: Step(count, adam=adam) for name in names}
        self.sums = dict.fromkeys(names, 0.0)
        self.lost, self.whole = torch.zeros(count), torch.zeros(count)

    def follow(self, moment: Moment) -> None:
        """Average the gradients of one training step, and measure the steps with a large batch."""
        mean = moment.mean
        averaged = self.averaging.average(moment.gradients)
        for name, step in self._steps.items():
            taken = step.take(averaged, mean if name == EXACT_SQUARES else averaged)
            if moment.large is not None:
                self.sums[name] += float(moment.large @ taken)
        if moment.large is not None:
            self.lost += (averaged - mean).square()
            self.whole += mean.square()

    def error(self, part: slice) -> float:
        """Return the relative error of some values over all measurements; 0 if the values are all zero."""
        return float((self.lost[part].sum() / self.whole[part].sum().clamp_min(1e-38)).sqrt())


def measure(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Return every scheme's figures on one training of a task."""
    task: Task = TASKS[name]()
    torch.manual_seed(seed)
    model = task.model()
    adam = isinstance(task.optimizer([nn.Parameter(torch.zeros(1))]), torch.optim.AdamW)
    parameters = list(reversed(list(model.parameters())))
    ends = [0, *itertools.accumulate(parameter.numel() for parameter in parameters)]
    parts = [slice(low, high) for low, high in itertools.pairwise(ends)]
    small = torch.cat([torch.full((p.numel(),), p.dim() <= 1) for p in parameters])
    followed = {
        scheme: Progress(Averaging(options, small), len(small), adam=adam)
        for scheme, options in SCHEMES.items()
    }
    exact = Progress(Exact(), len(small), adam=adam)
    for moment in training(task, model, seed=seed, steps=steps):
        for progress in (exact, *followed.values()):
            progress.follow(moment)
    return {scheme: _figures(progress, exact, parameters, parts) for scheme, progress in followed.items()}


class Exact:
    """Averages in fp32."""

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """Return the mean."""
        return gradients.mean(0)


def _figures(
    progress: Progress, exact: Progress, parameters: list[nn.Parameter], parts: list[slice]
) -> dict[str, Any]:
    errors = {
        kind: [
            progress.error(part)
            for p, part in zip(parameters, parts, strict=True)
            if (p.dim() <= 1) == is_small
        ]
        for kind, is_small in (("small", True), ("large", False))
    }
    return {
        "bytes": progress.averaging.bytes_ratio,
        "error": progress.error(slice(None)),
        **{name: total / exact.sums[name] for name, total in progress.sums.items()},
        "median_error_of_small_parameters": statistics.median(errors["small"]),
        "largest_error_of_small_parameters": max(errors["small"]),
        "median_error_of_large_parameters": statistics.median(errors["large"]),
        "largest_error_of_large_parameters": max(errors["large"]),
    }


COLUMNS = {
    "bytes": "bytes",
    "error": "error",
    "progress": "progress",
    EXACT_SQUARES: "exact sq.",
    "median_error_of_small_parameters": "1-d, median",
    "largest_error_of_small_parameters": "largest",
    "median_error_of_large_parameters": "others, median",
    "largest_error_of_large_parameters": "largest",
}


def compare(name: str, options: Namespace) -> Iterator[Found]:
    """Measure every scheme on a task, and print a table of means."""
    runs = [measure(name, seed, options.steps) for seed in range(options.seeds)]
    found = {
        scheme: {key: over_seeds([run[scheme][key] for run in runs]) for key in figures}
        for scheme, figures in runs[0].items()
    }
    print(f"\n{name}: {options.steps} steps, {options.seeds} seed(s), means")
    print(f"  {'':<40}" + "".join(f"{title:>16}" for title in COLUMNS.values()))
    for scheme, entry in found.items():
        cells = (f"{entry[key]['mean']:>16.3f}" if key in entry else f"{'-':>16}" for key in COLUMNS)
        print(f"  {scheme:<40}{''.join(cells)}", flush=True)
    yield ("tasks", name), found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    benchmark.parser.add_argument("--steps", type=int, default=300, help=f"more than {EVERY}")
    benchmark.parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)
    benchmark.run({name: partial(compare, name) for name in TASKS}, facts={"ranks": RANKS})
