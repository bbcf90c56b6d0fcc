"""DiLoCo with changes averaged in 8 and 4 bits: does it reach the losses of averages in fp32?

    python benchmarks/bench_diloco.py           # everything; takes minutes
    python benchmarks/bench_diloco.py --steps 80 --seeds 1 --output build/short

Four real ranks on Gloo train the transformer of bench_quant_convergence.py on characters of the standard
library's sources, with docs/examples/diloco.py: AdamW inside, and an outer step every 20 inner steps.
Streaming sends the parameters in four fragments, in turns; an average is used three steps after it was sent.
All configurations take the same number of inner steps. A seed fixes the initial parameters and all batches:
runs of one seed differ only in the averages. The final loss is on held-out data. fp32 uses
torch.distributed.all_reduce.

The verdict is that of bench_quant_convergence.py: it compares the mean difference from fp32's loss, on the
same schedule, with the standard deviation of fp32's own losses over the seeds, which is the effect of the
seed alone.

Bytes are those that rank 0 sends over TCP in one outer step of the whole model. All ranks share one
machine: the times say nothing about a network.

Writes results/diloco.json and .png beside this file.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_quant_convergence import Language, parameters_equal, verdict
from drawing import BLUE, save, subplots
from machine import describe_machine
from torch import nn

from ddp_quant_hooks import QuantizedAllreduceState, kernels
from dist_utils.testing import run_ranks, tcp_bytes_sent

sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "examples"))
from diloco import DiLoCo

RESULTS = Path(__file__).parent / "results"
RANKS, EVERY, FRAGMENTS, DELAY = 4, 20, 4, 3
TIMEOUT = 3600.0
QUIET = DELAY + 1
"""The inner step of a round after which no average is pending."""
REFERENCE, STREAMING = "fp32", "streaming"


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
    f"{REFERENCE}, {STREAMING}": Configuration(None, streaming=True),
    f"int8, {STREAMING}": Configuration({"error_feedback": "none"}, streaming=True),
}


@dataclass(frozen=True)
class Run:
    """One training.

    Args:
        training: The mean loss of the ranks in each round of inner steps.
        loss: The held-out loss; only rank 0 evaluates.
        ranks_equal: Whether all ranks ended with the same bits.
        bytes_per_round: Bytes that this rank sent per round.
        step_ms: Mean wall time of an inner step, including its share of the averages.
    """

    training: list[float]
    loss: float
    ranks_equal: bool
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


def train(task: Language, configuration: Configuration, seed: int, steps: int) -> Run:
    """Train one model on this rank's part of every batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = task.model()
    state = QuantizedAllreduceState(min_bytes=0, **(configuration.options or {}))
    outer = outer_optimizers(model, configuration, state)
    inner = task.optimizer(model.parameters())
    batches = torch.Generator().manual_seed(seed)
    losses = torch.empty(steps)
    sent: list[int] = []

    dist.barrier()
    began = time.perf_counter()
    for step in range(steps):
        # Every rank draws for all ranks, so the examples of a step do not depend on who computes them.
        mine = task.draw(world_size * task.batch, batches).view(world_size, task.batch)[rank]
        inner.zero_grad()
        loss = task.loss(model, mine)
        torch.autograd.backward(loss)
        inner.step()
        for fragment in outer:
            fragment.step()
        losses[step] = loss.detach()
        if (step + 1) % EVERY == QUIET:
            sent.append(tcp_bytes_sent())
    for fragment in outer:
        fragment.finish()
    seconds = time.perf_counter() - began

    dist.all_reduce(losses)
    equal = parameters_equal(model)
    held_out = 0.0
    if rank == 0:
        with torch.no_grad():
            held_out = task.evaluate(model)["loss"]
    state.close()
    return Run(
        training=(losses / world_size).view(-1, EVERY).mean(1).tolist(),
        loss=held_out,
        ranks_equal=equal,
        # Without the first round, in which connections are made.
        bytes_per_round=(sent[-1] - sent[1]) // (len(sent) - 2),
        step_ms=1e3 * seconds / steps,
    )


def train_all(rank: int, seeds: int, steps: int) -> dict[tuple[str, int], Run]:
    """Train on one rank with every configuration and every seed."""
    task = Language()
    runs = {}
    for seed, name in itertools.product(range(seeds), CONFIGURATIONS):
        runs[name, seed] = run = train(task, CONFIGURATIONS[name], seed, steps)
        gc.collect()  # close the last run's connections, whose bytes must not count in the next run
        if rank == 0:
            sent = f"{run.bytes_per_round / 1024:.1f} KiB"
            print(f"seed {seed}: {name:<18}{run.loss:8.4f}{sent:>14}{run.step_ms:8.1f} ms", flush=True)
    return runs


def reference_of(name: str) -> str:
    """Return the configuration that differs only in averaging in fp32."""
    return f"{REFERENCE}, {STREAMING}" if CONFIGURATIONS[name].streaming else REFERENCE


def summarize(runs: dict[tuple[str, int], Run], seeds: int) -> dict[str, Any]:
    """Return the entries of the result file, per configuration."""
    plain = [runs[REFERENCE, seed].loss for seed in range(seeds)]
    spread = statistics.stdev(plain) if seeds > 1 else None
    found: dict[str, Any] = {"fp32_standard_deviation_over_seeds": spread, "configurations": {}}
    plain_bytes = statistics.median(runs[REFERENCE, seed].bytes_per_round for seed in range(seeds))
    for name in CONFIGURATIONS:
        mine = [runs[name, seed] for seed in range(seeds)]
        sent = statistics.median(run.bytes_per_round for run in mine)
        entry: dict[str, Any] = {
            "loss": _summary([run.loss for run in mine]),
            "bytes_per_outer_step": int(sent),
            "share_of_fp32": round(sent / plain_bytes, 3),
            "ranks_equal": all(run.ranks_equal for run in mine),
            "step_ms": round(statistics.median(run.step_ms for run in mine), 1),
            "training": [
                round(statistics.fmean(point), 4)
                for point in zip(*(run.training for run in mine), strict=True)
            ],
        }
        if (reference := reference_of(name)) != name:
            differences = [mine[seed].loss - runs[reference, seed].loss for seed in range(seeds)]
            entry["difference_to_fp32"] = _summary(differences)
            entry["verdict"] = verdict(differences, spread)
        found["configurations"][name] = entry
    return found


def _summary(values: list[float]) -> dict[str, Any]:
    return {
        "mean": round(statistics.fmean(values), 5),
        "range": [round(min(values), 5), round(max(values), 5)],
        "by_seed": [round(value, 5) for value in values],
    }


def report(results: dict[str, Any]) -> None:
    """Print the table."""
    deviation = results["fp32_standard_deviation_over_seeds"]
    print(
        f"\n{results['ranks']} ranks, {results['parameters']} parameters, {results['steps']} steps, "
        f"{results['seeds']} seed(s); standard deviation of fp32's loss over seeds: "
        f"{'one seed' if deviation is None else format(deviation, '.2e')}"
    )
    print(
        f"  {'':<18}{'loss, mean [range]':<28}{'minus fp32, mean [range]':<34}"
        f"{'KiB/outer step':>15}{'of fp32':>9}{'ranks equal':>13}{'ms/step':>9}  verdict"
    )
    for name, entry in results["configurations"].items():
        difference = entry.get("difference_to_fp32")
        print(
            f"  {name:<18}{_text(entry['loss'], '.4f'):<28}"
            f"{_text(difference, '+.1e') if difference else '':<34}"
            f"{entry['bytes_per_outer_step'] / 1024:>15.1f}{entry['share_of_fp32']:>9.3f}"
            f"{'yes' if entry['ranks_equal'] else 'NO':>13}{entry['step_ms']:>9.1f}"
            f"  {entry.get('verdict', '')}"
        )


def _text(summary: dict[str, Any], form: str) -> str:
    low, high = summary["range"]
    return f"{summary['mean']:{form}} [{low:{form}}, {high:{form}}]"


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw every seed's final loss beside fp32's."""
    compared = [name for name in results["configurations"] if name != reference_of(name)]
    figure, (axis,) = subplots([0.6 + 0.3 * len(compared)], "Final loss of each seed, minus that of fp32")
    for place, name in enumerate(compared):
        by_seed = results["configurations"][name]["difference_to_fp32"]["by_seed"]
        axis.plot(by_seed, [place] * results["seeds"], "o", color=BLUE)
    if (deviation := results["fp32_standard_deviation_over_seeds"]) is not None:
        axis.axvspan(-deviation, deviation, color="0.9")
    axis.axvline(0, color="0.3", linewidth=1)
    axis.set_yticks(range(len(compared)), compared)
    axis.set_ylim(len(compared) - 0.5, -0.5)
    axis.locator_params(axis="x", nbins=5)
    axis.set(xlabel="gray: standard deviation of fp32 over seeds")
    save(figure, path)


def main() -> None:
    """Train, print and store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the result files")
    parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
    options = parser.parse_args()
    if options.plot:
        draw(json.loads((options.output / "diloco.json").read_text()), options.output / "diloco.png")
        return
    if options.steps % EVERY or options.steps < 4 * EVERY or options.seeds < 1:
        parser.error(f"--steps must be a multiple of {EVERY}, 4 of them or more, and --seeds at least 1")
    torch.set_num_threads(1)  # as in the ranks
    # Torch warns in the ranks whenever a private group ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    began = time.perf_counter()
    runs = run_ranks(train_all, RANKS, options.seeds, options.steps, timeout=TIMEOUT)[0]
    results: dict[str, Any] = {
        **describe_machine(),
        "kernels": kernels.describe().splitlines()[0],
        "ranks": RANKS,
        "inner_steps_per_outer_step": EVERY,
        "streaming": {"fragments": FRAGMENTS, "delay": DELAY},
        "steps": options.steps,
        "seeds": options.seeds,
        "parameters": sum(parameter.numel() for parameter in Language().model().parameters()),
        "training": f"means of {EVERY} steps and of all seeds",
        **summarize(runs, options.seeds),
        "minutes": round((time.perf_counter() - began) / 60, 1),
    }
    report(results)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "diloco.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, options.output / "diloco.png")
    print(f"\nwritten: {options.output / 'diloco.json'} and .png")
    unequal = [name for name, entry in results["configurations"].items() if not entry["ranks_equal"]]
    if unequal:
        raise SystemExit(f"the ranks ended with different parameters: {', '.join(unequal)}")


if __name__ == "__main__":
    main()
