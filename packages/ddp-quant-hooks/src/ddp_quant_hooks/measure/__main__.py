"""The command: ``torchrun ... -m ddp_quant_hooks.measure``; docs/measure.md says how to run and read it."""

from __future__ import annotations

import argparse
import math
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_quant_hooks
from ddp_quant_hooks.measure.advice import Model
from ddp_quant_hooks.measure.report import measure
from dist_utils import require_same_terms

_START = """nothing to measure: at least two ranks are needed, and torchrun starts them:
  torchrun --standalone --nproc-per-node 2 -m ddp_quant_hooks.measure
"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options; ends the process if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="torchrun ... -m ddp_quant_hooks.measure",
        description="Measure the links between ranks and what every communication hook costs on them.",
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="of the buckets")
    parser.add_argument("--budget", type=_seconds, default=40.0, help="seconds for measuring; 40")
    parser.add_argument(
        "--timeout", type=_seconds, default=120.0, help="seconds to wait for other ranks; 120"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where rank 0 writes the report")
    parser.add_argument(
        "--params", type=_whole_number, help="number of a model's parameters (7e6), to estimate its steps"
    )
    parser.add_argument("--step-seconds", type=_seconds, help="of a step of that model without communication")
    options = parser.parse_args(arguments)
    if (options.params is None) != (options.step_seconds is None):
        parser.error("--params and --step-seconds belong together")
    return options


def _whole_number(text: str) -> int:
    number = _number(text)
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text}")
    return int(number)


def _seconds(text: str) -> float:
    seconds = _number(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, got {text}")
    return seconds


def _number(text: str) -> float:
    """Return the number that a text is, NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def run(options: argparse.Namespace) -> None:
    """Join the others, measure, and let rank 0 print and write the report."""
    model = None if options.params is None else Model(options.params, options.step_seconds)
    device = _own_device(options.device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=options.timeout)
    )
    first, problem = dist.get_rank() == 0, None
    terms = {**vars(options), "json": None, "device": device, "version": ddp_quant_hooks.__version__}
    try:
        if first and options.json is not None:
            options.json.open("a").close()
    except OSError as error:
        problem = error
    require_same_terms(None, "ddp_quant_hooks.measure", terms, problem=problem)
    report = measure(device=device, budget=options.budget, progress=_show_progress if first else None)
    report = report if model is None else report.for_model(model)
    if first:
        if options.json is not None:
            options.json.write_text(report.as_json() + "\n")
        sys.stdout.write(report.as_text() + "\n")
    dist.barrier()  # Gloo's threads finish meanwhile: a process that ends before they do can abort
    dist.destroy_process_group()


def _own_device(wanted: str) -> str:
    """Return "cuda" if that is wanted or each rank on this host can have a GPU, and choose this rank's."""
    gpus = torch.cuda.device_count() if wanted != "cpu" and dist.is_nccl_available() else 0
    if wanted == "cuda" and not gpus:
        raise ValueError("--device cuda needs a GPU and a torch with NCCL on every rank")
    if wanted != "cuda" and gpus < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return "cpu"
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    return "cuda"


def _show_progress(share: float, text: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"{share:4.0%} {text:<20}\r")  # the report's first line is longer
        sys.stderr.flush()


def main() -> int:
    """Run the command; return its exit code."""
    options = parse()
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        sys.stderr.write(_START)
        return 2
    try:
        run(options)
    except Exception as error:  # noqa: BLE001 - every rank reports its error
        sys.stderr.write(f"rank {os.environ.get('RANK')}: {type(error).__name__}: {error}\n")
        # The interpreter's normal exit would wait for threads that wait for peers, which wait for this rank.
        os._exit(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
