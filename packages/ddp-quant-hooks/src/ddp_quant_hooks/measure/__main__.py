"""The command: ``torchrun ... -m ddp_quant_hooks.measure``; docs/measure.md says how to run and read it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import ddp_quant_hooks
from ddp_quant_hooks.measure.cost_model import Cluster
from ddp_quant_hooks.measure.devices import choose_device
from ddp_quant_hooks.measure.estimate import Model
from ddp_quant_hooks.measure.extra import MissingExtraError, require_extra
from ddp_quant_hooks.measure.joining import (
    Place,
    PlaceError,
    find_place,
    join,
    leave_after_error,
    nccl_is_there,
)
from ddp_quant_hooks.measure.report import Report, measure
from ddp_quant_hooks.measure.schedule import Progress
from dist_utils import require_same_terms

COMPARED = (
    "budget",
    "params",
    "step_seconds",
    "world",
    "gbit",
    "gpus_per_node",
    "backend",
    "device",
    "timeout",
)
"""Options that must be identical on all ranks."""
_LONGEST = 1e7
"""Seconds: some months."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; ends the process if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ddp_quant_hooks.measure",
        description="Measure the links between ranks and what every communication hook costs on them.",
    )
    joining = parser.add_argument_group("by hand, where neither torchrun nor srun starts the ranks")
    joining.add_argument("--rank", type=int, help="of this process")
    joining.add_argument("--world-size", type=int, help="number of processes")
    joining.add_argument("--master-addr", help="of rank 0's host")
    joining.add_argument("--master-port", type=int, help="on which rank 0 listens; 29500")
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="auto: NCCL where each rank has a GPU",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the buckets")
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for measuring; 40")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for other ranks; 120")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the report")
    model = parser.add_argument_group("estimate a model's steps")
    model.add_argument("--params", type=int, help="number of its parameters")
    model.add_argument("--step-seconds", type=float, help="of a step without communication")
    other = parser.add_argument_group("predict for another cluster")
    other.add_argument("--world", type=int, help="its number of ranks")
    other.add_argument("--gbit", type=float, help="of each node's link")
    other.add_argument("--gpus-per-node", type=int, help="ranks of each node; 1")
    options = parser.parse_args(arguments)
    for left, right in (("params", "step_seconds"), ("world", "gbit")):
        if (getattr(options, left) is None) != (getattr(options, right) is None):
            parser.error(f"--{left} and --{right.replace('_', '-')} belong together")
    if options.world is None and options.gpus_per_node is not None:
        parser.error("--gpus-per-node belongs to --world and --gbit")
    for name in ("budget", "timeout"):
        if not 0 < getattr(options, name) <= _LONGEST:
            parser.error(
                f"--{name} must be positive and at most {_LONGEST:g}, got {getattr(options, name):g}"
            )
    if options.backend == "nccl" and options.device == "cpu":
        parser.error("--backend nccl needs --device cuda")
    try:
        options.model = None if options.params is None else Model(options.params, options.step_seconds)
        options.cluster = (
            None
            if options.world is None
            else Cluster(
                options.world, options.gbit, 1 if options.gpus_per_node is None else options.gpus_per_node
            )
        )
    except ValueError as error:
        parser.error(str(error))
    return options


def run(options: argparse.Namespace, place: Place) -> None:
    """Join the others, measure, and let rank 0 print and write the report."""
    nccl = options.backend != "gloo" and options.device != "cpu" and nccl_is_there()
    join(place, nccl=nccl, timeout=timedelta(seconds=options.timeout))
    compared = {name: getattr(options, name) for name in COMPARED}
    compared["version"] = ddp_quant_hooks.__version__
    require_same_terms(None, "ddp_quant_hooks.measure", compared, problem=_problem(options, place, nccl=nccl))
    device = choose_device(place.node, wanted=options.device, nccl=nccl)
    with _progress(shown=place.rank == 0) as progress:
        report = measure(device=device, budget=options.budget, node=place.node, progress=progress)
    if options.model is not None:
        report = report.for_model(options.model)
    if options.cluster is not None:
        report = report.for_cluster(options.cluster)
    if place.rank == 0:
        if options.json is not None:
            options.json.write_text(report.as_json() + "\n")
        _show(report)
    dist.barrier()  # Gloo's threads finish meanwhile: a process that ends before they do can abort
    dist.destroy_process_group()


def _problem(options: argparse.Namespace, place: Place, *, nccl: bool) -> Exception | None:
    """Return what would go wrong on this rank later."""
    if options.backend == "nccl" and not nccl:
        return ValueError("backend is 'nccl', but there is no GPU or this torch has no NCCL")
    return _problem_of_file(options.json) if place.rank == 0 and options.json is not None else None


def _problem_of_file(file: Path) -> Exception | None:
    """Return why a report cannot be written there."""
    folder = file.absolute().parent
    if not folder.is_dir():
        return FileNotFoundError(f"no folder for --json {file}")
    if file.is_dir():
        return IsADirectoryError(f"--json {file} is a folder")
    if not os.access(file if file.exists() else folder, os.W_OK):
        return PermissionError(f"--json {file} cannot be written")
    return None


@contextlib.contextmanager
def _progress(*, shown: bool) -> Iterator[Progress | None]:
    if not shown:
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - part of an extra

    from ddp_quant_hooks.measure.tables import progress_bar  # noqa: PLC0415

    with progress_bar(Console(stderr=True)) as tell:
        yield tell


def _show(report: Report) -> None:
    from rich.console import Console  # noqa: PLC0415

    from ddp_quant_hooks.measure.tables import print_report  # noqa: PLC0415

    console = Console()
    # Without a terminal rich assumes 80 columns, too few for the table of hooks.
    print_report(report, console if console.is_terminal else Console(width=140))


def main() -> int:
    """Run the command; return its exit code."""
    options = parse()
    try:
        require_extra()
        place = find_place(
            os.environ,
            rank=options.rank,
            world_size=options.world_size,
            address=options.master_addr,
            port=options.master_port,
        )
    except (MissingExtraError, PlaceError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    try:
        run(options, place)
    except Exception as error:  # noqa: BLE001 - every rank reports its error
        sys.stderr.write(f"rank {place.rank}: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        leave_after_error()
        # The interpreter's normal exit would wait for threads that wait for peers, which wait for this rank.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
