"""DiLoCo with changes averaged in 8 and 4 bits: does it reach the losses of averages in fp32?

    python benchmarks/bench_diloco.py           # everything; takes minutes
    python benchmarks/bench_diloco.py --steps 80 --seeds 1 --output build/short.json

Four real ranks on Gloo train the language model of tasks.py on characters of the standard library's sources,
with docs/examples/diloco.py: AdamW inside, and an outer step every 20 inner steps. Streaming sends the
parameters in four fragments, in turns; an average is used three steps after it was sent. All configurations
take the same number of inner steps. The final loss is on held-out data, and is compared with that of
torch.distributed.all_reduce in fp32 on the same schedule (``training.against_reference``).

Bytes are those that rank 0 sends over TCP in one outer step of the whole model. All ranks share one
machine: the times say nothing about a network.

Writes results/diloco.json.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Benchmark, Found
from tasks import Language
from torch import nn
from training import (
    REFERENCE,
    against_reference,
    deviation,
    held_out,
    mean_curve,
    means,
    over_seeds,
    print_losses,
    take_step,
    train,
)

from ddp_quant_hooks import QuantizedAllreduceState, kernels
from dist_utils.testing import run_ranks, same_on_all_ranks, tcp_bytes_sent

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
from diloco import DiLoCo

RANKS, EVERY, FRAGMENTS, DELAY = 4, 20, 4, 3
QUIET = DELAY + 1
"""The inner step of a round after which no average is pending."""
STREAMING = ", streaming"


@dataclass(frozen=True)
class Configuration:
    """How changes are averaged; in fp32 if there are no options for a state."""

    options: dict[str, Any] | None
    streaming: bool = False


CONFIGURATIONS = {
    REFERENCE: Configuration(None),
    "int8": Configuration({"error_feedback": "none"}),
    "int8, feedback": Configuration({"error_feedback": "both"}),
    "int4": Configuration({"bits": 4, "error_feedback": "none"}),
    "int4, feedback": Configuration({"bits": 4, "error_feedback": "both"}),
    f"{REFERENCE}{STREAMING}": Configuration(None, streaming=True),
    f"int8{STREAMING}": Configuration({"error_feedback": "none"}, streaming=True),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        training: The mean loss of the ranks in each round of inner steps.
        loss: The held-out loss; only rank 0 evaluates.
        bytes_per_round: Bytes that this rank sent per round.
        step_ms: Mean wall time of an inner step, including its share of the averages.
    """

    training: list[float]
    loss: float
    bytes_per_round: int
    step_ms: float


class ExactDiLoCo(DiLoCo):
    """Averages without compression, and waits for the result."""

    def send(self) -> None:
        """Average the changes with the ordinary all-reduce."""
        changes = [old - new.detach() for old, new in zip(self.shared, self.parameters, strict=True)]
        together = nn.utils.parameters_to_vector(changes)
        dist.all_reduce(together)
        nn.utils.vector_to_parameters(together / dist.get_world_size(), changes)
        self.average = torch.futures.Future()
        self.average.set_result(changes)


def in_fragments(model: nn.Module, count: int) -> list[list[nn.Parameter]]:
    """Cut a model's parameters into consecutive parts with about the same number of values."""
    parameters = list(model.parameters())
    total = sum(parameter.numel() for parameter in parameters)
    fragments: list[list[nn.Parameter]] = [[] for _ in range(count)]
    before = 0
    for parameter in parameters:
        fragments[before * count // total].append(parameter)
        before += parameter.numel()
    return [fragment for fragment in fragments if fragment]


def outer_optimizers(
    model: nn.Module, configuration: Configuration, state: QuantizedAllreduceState
) -> list[DiLoCo]:
    """Return the outer optimizers, one per fragment."""
    kind = ExactDiLoCo if configuration.options is None else DiLoCo
    fragments = in_fragments(model, FRAGMENTS if configuration.streaming else 1)
    return [
        kind(
            fragment,
            state,
            f"fragment {number}",
            EVERY,
            turn=EVERY * number // len(fragments),
            delay=DELAY if configuration.streaming else 0,
        )
        for number, fragment in enumerate(fragments)
    ]


def train_once(task: Language, name: str, seed: int, steps: int) -> Run:
    """Train one model."""
    torch.manual_seed(seed)
    model, configuration = task.model(), CONFIGURATIONS[name]
    state = QuantizedAllreduceState(min_bytes=0, **(configuration.options or {}))
    outer = outer_optimizers(model, configuration, state)
    inner = task.optimizer(model.parameters())
    numbers, sent = itertools.count(1), []

    def step(chosen: torch.Tensor) -> torch.Tensor:
        loss = take_step(task, model, inner, chosen)
        for fragment in outer:
            fragment.step()
        if next(numbers) % EVERY == QUIET:
            sent.append(tcp_bytes_sent())
        return loss

    dist.barrier()
    began = time.perf_counter()
    losses = train(task, step, seed, steps)
    for fragment in outer:
        fragment.finish()
    seconds = time.perf_counter() - began
    if not same_on_all_ranks(list(model.parameters())):
        raise RuntimeError(f"{name}: the ranks ended with different parameters")
    state.close()
    return Run(
        training=means(losses, EVERY),
        loss=held_out(task, model).get("loss", 0.0),
        # Without the first round, in which connections are made.
        bytes_per_round=(sent[-1] - sent[1]) // (len(sent) - 2),
        step_ms=1e3 * seconds / steps,
    )


def train_all(rank: int, seeds: int, steps: int) -> dict[tuple[str, int], Run]:
    """Train on one rank with every configuration and every seed."""
    task = Language()
    runs = {}
    for seed, name in itertools.product(range(seeds), CONFIGURATIONS):
        runs[name, seed] = run = train_once(task, name, seed, steps)
        gc.collect()  # close the last run's connections, whose bytes must not count in the next run
        if rank == 0:
            sent = f"{run.bytes_per_round / 1024:.1f} KiB"
            print(f"seed {seed}: {name:<18}{run.loss:8.4f}{sent:>14}{run.step_ms:8.1f} ms", flush=True)
    return runs


def reference_of(name: str) -> str:
    """Return the configuration that differs only in averaging in fp32."""
    return REFERENCE + (STREAMING if CONFIGURATIONS[name].streaming else "")


def compare(options: Namespace) -> Iterator[Found]:
    """Train with every configuration."""
    began, seeds = time.perf_counter(), range(options.seeds)
    runs = run_ranks(train_all, RANKS, options.seeds, options.steps, timeout=3600)[0]
    losses = {name: [runs[name, seed].loss for seed in seeds] for name in CONFIGURATIONS}
    spread = deviation(losses[REFERENCE])
    sent = {
        name: statistics.median(runs[name, seed].bytes_per_round for seed in seeds) for name in CONFIGURATIONS
    }
    found: dict[str, Any] = {}
    for name in CONFIGURATIONS:
        mine = [runs[name, seed] for seed in seeds]
        found[name] = {
            "loss": over_seeds(losses[name]),
            "bytes_per_outer_step": int(sent[name]),
            "share_of_fp32": round(sent[name] / sent[REFERENCE], 3),
            "step_ms": round(statistics.median(run.step_ms for run in mine), 1),
            "training": mean_curve([run.training for run in mine]),
        }
        if (reference := reference_of(name)) != name:
            found[name] |= against_reference(losses[name], losses[reference], spread)
    print_losses(f"{options.steps} steps, {options.seeds} seed(s)", spread, found, "loss")
    yield ("fp32_standard_deviation_over_seeds",), spread
    yield ("minutes",), round((time.perf_counter() - began) / 60, 1)
    yield ("configurations",), found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    help_ = f"a multiple of {EVERY}, at least {4 * EVERY}"
    benchmark.parser.add_argument("--steps", type=int, default=240, help=help_)
    benchmark.parser.add_argument("--seeds", type=int, default=3)
    torch.set_num_threads(1)  # as in the ranks
    benchmark.run(
        {"configurations": compare},
        facts={
            "kernels": kernels.describe().splitlines()[0],
            "ranks": RANKS,
            "inner_steps_per_outer_step": EVERY,
            "streaming": {"fragments": FRAGMENTS, "delay": DELAY},
            "parameters": sum(parameter.numel() for parameter in Language().model().parameters()),
            "training": f"means of {EVERY} steps and of all seeds",
        },
    )
