"""Whole training steps with every hook, with and without an overlapped optimizer: the gain for a user.

    python benchmarks/bench_whole_steps.py                  # everything: hours, and hosts need root
    python benchmarks/bench_whole_steps.py steps --models 7M --hosts 2 --rates 1gbit --sides plain fp16 8bits
    python benchmarks/bench_whole_steps.py losses           # an hour
    python benchmarks/bench_whole_steps.py table            # of the stored results, for documents
    python benchmarks/bench_whole_steps.py short-table      # the README's
    python benchmarks/bench_whole_steps.py factors-table    # low rank and PowerSGD
    python benchmarks/bench_whole_steps.py equal-time       # losses, by links

Models: transformers of 7 and 57 million parameters on the standard library's sources, a convolutional network
and a wide perceptron on digits (scikit-learn's). AdamW; SGD for the convolutional network. One thread per
rank; one batch per rank. Hosts are emulated on the cores of this machine. Every repeat steps all sides of a
job, in turns forwards and backwards, and one model without communication; whole_steps/summary.py defines the
figures. Where not all models fit into memory a cell has several jobs, each with plain DDP, and ratios are
within one job. PyTorch's hooks that hang or fail on Gloo have jobs of their own; their errors are recorded
instead of times.

Losses: whole trainings with each number format on the wire, three seeds, with two ranks on emulated hosts,
and the time that they take.

Writes results/whole_steps.json and pictures.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from emulated_hosts import EmulationUnavailableError
from harness import RESULTS, Benchmark, Found
from machine import describe_machine, describe_tree
from tasks import MODELS
from whole_steps.cells import LOOPBACK, RATES, Cell, chosen_cells, jobs_of, run
from whole_steps.gains import draw_gains
from whole_steps.losses import DILOCO, HOW_LONG, learn_all
from whole_steps.plots import draw
from whole_steps.ranks import Job
from whole_steps.sides import ALL, COMPUTE, PLAIN, label
from whole_steps.summary import summarize
from whole_steps.tables import equal_time, factors_table, short_table, tables


def measure_cell(cell: Cell, options: Namespace) -> Iterator[Found]:
    """Run the jobs of a cell, and yield the results of each."""
    names = [name for name in ALL if name in options.sides]
    try:
        waiting = list(jobs_of(cell, names, options.repeats, options.memory_gib))
    except MemoryError as error:
        print(f"SKIPPED {error}", file=sys.stderr)
        return
    measured = False
    while waiting:
        job = waiting.pop(0)
        _, *others = job.sides
        try:
            found = summarize(run(cell, job), RATES.get(cell.rate), cell.ranks_per_host)
        except EmulationUnavailableError as error:
            print(f"SKIPPED {cell.name}: {error}", file=sys.stderr)
            return
        except RuntimeError as error:
            if len(others) > 1:  # run them one by one to find the failing one
                waiting = [Job(**{**vars(job), "sides": (PLAIN, name)}) for name in others] + waiting
                continue
            reason = str(error).strip().splitlines()[0]
            for name in others or [PLAIN]:
                print(f"{cell.name}: {label(name)} FAILED: {reason}", flush=True)
                yield ("cells", cell.name, "sides", name), {"failed": reason}
            continue
        about = {**describe_machine(), "tree": describe_tree()}
        report(cell, job, found["sides"])
        for name, side in found.pop("sides").items():
            # Ratios are within each job; the table shows the first job's reference.
            if not (measured and name in (COMPUTE, PLAIN)):
                yield ("cells", cell.name, "sides", name), {**side, "run": about}
        for key, value in found.items():
            yield ("cells", cell.name, key), value
        measured = True


def steps(options: Namespace) -> Iterator[Found]:
    """Measure every cell, the most important first."""
    for cell in chosen_cells(options.models, options.hosts, options.rates, options.ranks_per_host):
        yield from measure_cell(cell, options)


def report(cell: Cell, job: Job, sides: dict[str, Any]) -> None:
    """Print the results of a job."""
    compute = sides[PLAIN]["compute_ms"]
    print(f"\n{cell.name}: computation {compute} ms, load {sides[PLAIN]['load_1_5_15_min']}")
    for name in job.sides:
        side = sides[name]
        print(
            f"  {label(name):<40}{side['median_ms']:>9.1f} {side['quartiles_ms']!s:<18}"
            f"{side['faster_than_plain']['median']:>7.2f}x  exposed {side['exposed']['median_ms']:>7.1f}"
            f"  last bucket {side['last_bucket_ms']:>6.1f}  {side['mib_sent']:>8.2f} MiB"
            f"  of possible {side['fraction_of_possible']:.2f}",
            flush=True,
        )


def draw_both(results: dict[str, Any], path: Path) -> None:
    """Draw the losses over time, and the gains."""
    draw(results, path)
    if "cells" in results:
        draw_gains(results, path.with_name(f"{path.stem}_gains.png"))


def main() -> None:
    """Run the requested parts."""
    printed = {
        "table": tables,
        "short-table": short_table,
        "factors-table": factors_table,
        "equal-time": equal_time,
    }
    if len(sys.argv) > 1 and (make := printed.get(sys.argv[1])):
        file = sys.argv[2] if len(sys.argv) > 2 else RESULTS / "whole_steps.json"
        print(make(json.loads(Path(file).read_text())))
        return
    benchmark = Benchmark(__file__, __doc__, repeats=31)
    add = benchmark.parser.add_argument
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--hosts", type=int, nargs="+", default=[2, 4, 8], help="on loopback: ranks")
    add("--rates", nargs="+", default=[*RATES, LOOPBACK], choices=[*RATES, LOOPBACK])
    add("--ranks-per-host", type=int, nargs="+", default=[1, 2, 4])
    sides = [*ALL, DILOCO]  # DiLoCo has no step to compare, only losses
    add("--sides", nargs="+", default=sides, choices=sides)
    add("--memory-gib", type=float, default=12, help="for the models of all ranks")
    add("--steps", type=int, default=HOW_LONG, help="of losses")
    add("--seeds", type=int, default=3, help="of losses")
    benchmark.run({"steps": steps, "losses": learn_all}, draw=draw_both)


if __name__ == "__main__":
    main()
