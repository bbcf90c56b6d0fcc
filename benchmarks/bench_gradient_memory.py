"""Memory for gradients: DDP's ordinary loop, the overlap, and the overlap that releases them.

    python benchmarks/bench_gradient_memory.py           # everything, ten minutes
    python benchmarks/bench_gradient_memory.py peaks --runs 1
    python benchmarks/bench_gradient_memory.py limit     # needs root and the memory controller of cgroup v1

Two ranks on Gloo, linear layers of 192 MiB in 12 buckets, AdamW (fused) and SGD. Writes
results/gradient_memory.json and .png beside this file; running one part replaces only its
own numbers.

peaks: peak memory of a fresh process above its level after making the DDP model, in MiB, of the rank with
more: of the first pass, in which DDP has all gradients in one bucket, and of four later ones. The allocator
keeps no freed memory, because what it keeps would differ from run to run.

limit: one program, with an unchanged allocator, in a control group with limited memory: how it ends on each
side.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bar_charts import draw_bars
from machine import describe_machine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results"
ORDINARY, BUCKET, RELEASED = "ordinary loop", "ours: BUCKET", "ours: release_gradients"
SIDES = (ORDINARY, BUCKET, RELEASED)
WIDTH, LAYERS = 2048, 12
MODEL = 4 * WIDTH * WIDTH * LAYERS / 2**20
PASSES = 5
_MMAP_THRESHOLD = -3  # a constant in glibc's malloc.h
_CGROUPS = Path("/sys/fs/cgroup/memory")


def make_optimizer(name: str, ddp: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW or SGD."""
    if name == "AdamW":
        return torch.optim.AdamW(ddp.parameters(), lr=1e-4, fused=True)
    return torch.optim.SGD(ddp.parameters(), lr=1e-4)


def make_ddp(*, view: bool) -> DistributedDataParallel:
    """Return a model with 12 buckets from the second pass on."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    return DistributedDataParallel(net, bucket_cap_mb=MODEL / LAYERS, gradient_as_bucket_view=view)


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Run one pass."""
    optimizer.zero_grad()
    ddp(torch.ones(1, WIDTH)).mean().backward()
    optimizer.step()


def measure_peaks(rank: int, name: str, side: str, view: bool) -> dict[str, float]:
    """Return the peaks of the first pass and of later ones, in MiB above the start."""
    del rank
    torch.set_num_threads(1)
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)
    warm = DistributedDataParallel(nn.Linear(8, 8))  # loads code, starts threads
    warm(torch.ones(1, 8)).sum().backward()
    make_optimizer(name, warm).step()
    del warm
    ddp = make_ddp(view=view)
    optimizer = make_optimizer(name, ddp)
    if side != ORDINARY:
        overlap_optimizer(ddp, optimizer, release_gradients=side == RELEASED)
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    _forget_peak()
    train(ddp, optimizer)
    first = _status("VmHWM") - before
    _forget_peak()
    for _ in range(PASSES - 1):
        train(ddp, optimizer)
    return {
        "first pass": first,
        "later passes": _status("VmHWM") - before,
        "at rest": _status("VmRSS") - before,
    }


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def all_peaks(runs: int) -> dict[str, Any]:
    """Return the median of every side's peaks, and the largest and smallest."""
    found: dict[str, Any] = {}
    for name in ("AdamW", "SGD"):
        for view in (True, False):
            row = found.setdefault(f"{name}, gradient_as_bucket_view={view}", {})
            for side in SIDES:
                peaks = [
                    {key: max(rank[key] for rank in ranks) for key in ranks[0]}
                    for ranks in (
                        run_ranks(measure_peaks, 2, name, side, view, timeout=240) for _ in range(runs)
                    )
                ]
                row[side] = {
                    key: {
                        "median_mib": round(statistics.median(peak[key] for peak in peaks)),
                        "range_mib": [round(pick(peak[key] for peak in peaks)) for pick in (min, max)],
                    }
                    for key in peaks[0]
                }
                for value in row[side].values():
                    value["runs"] = runs
            plain = row[ORDINARY]
            for side in SIDES[1:]:
                for key, value in row[side].items():
                    value["of_ordinary"] = round(value["median_mib"] / plain[key]["median_mib"], 2)
            print(name, f"{view=}", json.dumps(row), flush=True)
    return found


def train_with_adamw(rank: int, side: str) -> int:
    """Train on one rank of the program that runs in a control group, like any other program."""
    del rank
    ddp = make_ddp(view=False)
    optimizer = make_optimizer("AdamW", ddp)
    if side != ORDINARY:
        overlap_optimizer(ddp, optimizer, release_gradients=side == RELEASED)
    for _ in range(PASSES):
        train(ddp, optimizer)
    return PASSES


@contextlib.contextmanager
def control_group(limit: float | None) -> Iterator[Path]:
    """Make a control group with a memory limit in MiB."""
    group = _CGROUPS / f"gradient_memory_{os.getpid()}"
    group.mkdir()
    try:
        if limit is not None:
            (group / "memory.limit_in_bytes").write_text(str(int(limit * 2**20)))
        yield group
    finally:
        for _ in range(100):  # until the last process has gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.1)


def run_limited(side: str, limit: float | None) -> dict[str, Any]:
    """Run the program; return its memory use, and whether it finished."""
    with control_group(limit) as group:
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, __file__, "program", f"--side={side}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        killed = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
        return {
            "ended_well": done.returncode == 0,
            "killed_by_the_limit": int(killed["oom_kill"]),
            "most_used_mib": round(int((group / "memory.max_usage_in_bytes").read_text()) / 2**20),
        }


def find_limit() -> dict[str, Any]:
    """Return every side's memory use without a limit, and how each ends with a limit between them."""
    free = {side: run_limited(side, None) for side in SIDES}
    limit = round((free[ORDINARY]["most_used_mib"] + free[RELEASED]["most_used_mib"]) / 2)
    limited = {side: run_limited(side, limit) for side in SIDES}
    return {"without a limit": free, "limit_mib": limit, "with the limit": limited}


def draw(results: dict[str, Any]) -> None:
    """Draw the peaks of passes after the first."""
    panels = {
        case: {
            side: (row["later passes"]["median_mib"], row["later passes"]["range_mib"])
            for side, row in sides.items()
        }
        for case, sides in results.get("peaks", {}).get("cases", {}).items()
    }
    if panels:
        title, path = "Peak of memory above the model, second pass and later", RESULTS / "gradient_memory.png"
        draw_bars(panels, "MiB", path, title=title)


def main() -> None:
    """Run the requested parts, and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("all", "peaks", "limit", "plot", "program")
    parser.add_argument("part", nargs="?", default="all", choices=parts)
    parser.add_argument("--runs", type=int, default=3, help="runs of every side, for peaks")
    parser.add_argument("--side", choices=SIDES, help="used by the program")
    options = parser.parse_args()
    if options.part == "program":
        run_ranks(train_with_adamw, 2, options.side, timeout=240)
        return
    path = RESULTS / "gradient_memory.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if options.part in ("all", "peaks"):
        results["peaks"] = {**describe_machine(), "model_mib": MODEL, "cases": all_peaks(options.runs)}
    if options.part in ("all", "limit"):
        if os.access(_CGROUPS, os.W_OK):
            results["limit"] = {**describe_machine(), "model_mib": MODEL, **find_limit()}
            print(json.dumps(results["limit"], indent=1))
        else:
            print(f"no limit: {_CGROUPS} is not there, or not ours", file=sys.stderr)
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)


if __name__ == "__main__":
    main()
