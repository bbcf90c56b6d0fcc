"""Whole training steps with every hook, with and without an overlapped optimizer: the gain for a user.

    python benchmarks/bench_whole_steps.py                  # everything: hours, and hosts need root
    python benchmarks/bench_whole_steps.py steps --models 7M --hosts 2 --rates 1gbit --sides plain fp16 8bits
    python benchmarks/bench_whole_steps.py losses           # an hour
    python benchmarks/bench_whole_steps.py table | plot     # of the stored results, for documents

Models: transformers of 7 and 57 million parameters on the standard library's sources, a convolutional network
and a wide perceptron on digits (scikit-learn's). AdamW; SGD for the convolutional network. One thread per
rank; one batch per rank. Hosts are emulated on the cores of this machine. Every repeat steps all sides of a
job, in turns forwards and backwards, and one model without communication; whole_steps/summary.py defines the
figures. Where not all models fit into memory a cell has several jobs, each with plain DDP, and ratios are
within one job. PyTorch's hooks that hang or fail on Gloo have jobs of their own; their errors are recorded
instead of times.

Losses: the loss that each number format on the wire reaches after equal steps, with two ranks on loopback and
three seeds; an overlapped optimizer gives the same bits. After equal time: the same curves, read at the steps
that the cell's step times allow.

Writes results/whole_steps.json: running one part replaces only its own numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from emulated_hosts import EmulationUnavailableError
from machine import describe_machine, describe_tree
from whole_steps.cells import LOOPBACK, RATES, Cell, chosen_cells, jobs_of, run
from whole_steps.gains import draw_gains
from whole_steps.losses import DILOCO, HOW_LONG, learn_all
from whole_steps.plots import draw
from whole_steps.ranks import Job, be_a_rank
from whole_steps.sides import ALL, COMPUTE, PLAIN, available, label
from whole_steps.summary import summarize
from whole_steps.tables import tables
from whole_steps.tasks import MODELS

RESULTS = Path(__file__).parent / "results" / "whole_steps.json"


def measure_cell(cell: Cell, options: argparse.Namespace, results: dict[str, Any], path: Path) -> None:
    """Run the jobs of a cell, and write the results of each."""
    asked = [name for name in options.sides if name in ALL and name != PLAIN]
    names = available([PLAIN, *asked], cell.ranks_per_host)
    try:
        waiting = list(jobs_of(cell, names, options.repeats, options.memory_gib))
    except MemoryError as error:
        print(f"SKIPPED {error}", file=sys.stderr)
        return
    entry = results.setdefault("cells", {}).setdefault(cell.name, {"sides": {}})
    measured = False
    while waiting:
        job = waiting.pop(0)
        try:
            ranks = run(cell, job)
        except EmulationUnavailableError as error:
            print(f"SKIPPED {cell.name}: {error}", file=sys.stderr)
            return
        except RuntimeError as error:
            _, *others = job.sides
            if len(others) > 1:  # run them one by one to find the failing one
                waiting = [Job(**{**vars(job), "sides": (PLAIN, name)}) for name in others] + waiting
                continue
            for name in others or [PLAIN]:
                entry["sides"][name] = {"failed": str(error)}
                print(f"{cell.name}: {label(name)} FAILED: {error}", flush=True)
        else:
            found = summarize(ranks, RATES.get(cell.rate), cell.ranks_per_host)
            about = {**describe_machine(), "tree": describe_tree()}
            sides = {name: {**side, "run": about} for name, side in found.pop("sides").items()}
            if measured:  # ratios are within each job; the table shows the first job's reference
                sides = {name: side for name, side in sides.items() if name not in (COMPUTE, PLAIN)}
            measured = True
            entry["sides"] |= sides
            entry |= found
            report(cell, job, entry["sides"])
        save(results, path)


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


def save(results: dict[str, Any], path: Path) -> None:
    """Write the results, so that an interrupted run keeps them."""
    path.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["all", "steps", "losses", "table", "plot", "rank"]
    parser.add_argument("part", nargs="?", default="all", choices=parts)
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8], help="on loopback: ranks")
    parser.add_argument("--rates", nargs="+", default=[*RATES, LOOPBACK], choices=[*RATES, LOOPBACK])
    parser.add_argument("--ranks-per-host", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    sides = [*ALL, DILOCO]  # DiLoCo has no step to compare, only losses
    parser.add_argument("--sides", nargs="+", default=sides, choices=sides)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--memory-gib", type=float, default=12, help="for the models of all ranks")
    parser.add_argument("--steps", type=int, default=HOW_LONG, help="of losses")
    parser.add_argument("--seeds", type=int, default=3, help="of losses")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the result file")
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, for the quartiles")
    if options.part == "rank":
        be_a_rank(options.folder, Job.from_text(options.job))
        return
    path = options.output
    results = json.loads(path.read_text()) if path.exists() else {}
    if options.part in ("all", "steps"):
        for cell in chosen_cells(options.models, options.hosts, options.rates, options.ranks_per_host):
            measure_cell(cell, options, results, path)
    if options.part in ("all", "losses"):
        learn_all(options, results, lambda: save(results, path))
    if options.part == "table":
        print(tables(results))
    else:
        draw(results, path.with_suffix(".png"))
        draw_gains(results, path.with_name(f"{path.stem}_gains.png"))


if __name__ == "__main__":
    main()
