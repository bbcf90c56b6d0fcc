"""Memory for gradients: DDP's ordinary loop, the overlap, and the overlap that releases them.

    python benchmarks/bench_gradient_memory.py           # everything, ten minutes
    python benchmarks/bench_gradient_memory.py --runs 1

Two ranks on Gloo, linear layers of 192 MiB in 12 buckets, AdamW (fused) and SGD. Writes
results/gradient_memory.json and .png.

Peak memory of a fresh process above its level after making the DDP model, in MiB, of the rank with
more: of the first pass, in which DDP has all gradients in one bucket, and of four later ones. The allocator
keeps no freed memory, because what it keeps would differ from run to run.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory
import torch
from drawing import draw_bars
from harness import Benchmark, Found
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from dist_utils.testing import run_ranks

ORDINARY, OVERLAPPED, RELEASED = "ordinary loop", "ours: overlapped step", "ours: release_gradients"
SIDES = (ORDINARY, OVERLAPPED, RELEASED)
WIDTH, LAYERS = 2048, 12
MODEL = 4 * WIDTH * WIDTH * LAYERS / 2**20
PASSES = 5


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


def train(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, passes: int) -> None:
    """Run some passes."""
    for _ in range(passes):
        optimizer.zero_grad()
        ddp(torch.ones(1, WIDTH)).mean().backward()
        optimizer.step()


def make_side(side: str, name: str, *, view: bool) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a model and its optimizer."""
    ddp = make_ddp(view=view)
    optimizer = make_optimizer(name, ddp)
    if side != ORDINARY:
        overlap_optimizer(ddp, optimizer, release_gradients=side == RELEASED)
    return ddp, optimizer


def measure_peaks(rank: int, name: str, side: str, view: bool) -> dict[str, float]:  # noqa: ARG001
    """Return the peaks of the first pass and of later ones, in MiB above the start."""
    memory.return_freed_memory()
    warm = DistributedDataParallel(nn.Linear(8, 8))  # loads code, starts threads
    warm(torch.ones(1, 8)).sum().backward()
    make_optimizer(name, warm).step()
    del warm
    model = make_side(side, name, view=view)
    before = memory.begin_peak()
    train(*model, passes=1)
    first = memory.peak() - before
    memory.forget_peak()
    train(*model, passes=PASSES - 1)
    return {
        "first pass": first,
        "later passes": memory.peak() - before,
        "at rest": memory.now() - before,
    }


def all_peaks(options: Namespace) -> Iterator[Found]:
    """Measure every side's peaks: the median, and the largest and smallest."""
    for name, view in ((name, view) for name in ("AdamW", "SGD") for view in (True, False)):
        row: dict[str, Any] = {}
        for side in SIDES:
            runs = [run_ranks(measure_peaks, 2, name, side, view, timeout=240) for _ in range(options.runs)]
            row[side] = {}
            for key in runs[0][0]:
                peaks = [max(rank[key] for rank in ranks) for ranks in runs]
                row[side][key] = {
                    "median_mib": round(statistics.median(peaks)),
                    "range_mib": [round(min(peaks)), round(max(peaks))],
                    "runs": options.runs,
                }
                if side != ORDINARY:
                    share = row[side][key]["median_mib"] / row[ORDINARY][key]["median_mib"]
                    row[side][key]["of_ordinary"] = round(share, 2)
            print(f"{name}, {view=}, {side}: {row[side]}", flush=True)
        yield ("peaks", "cases", f"{name}, gradient_as_bucket_view={view}"), row


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the peaks of passes after the first."""
    panels = {
        case: {
            side: (row["later passes"]["median_mib"], row["later passes"]["range_mib"])
            for side, row in sides.items()
        }
        for case, sides in results.get("peaks", {}).get("cases", {}).items()
    }
    title = "Peak of memory above the model, second pass and later"
    draw_bars(panels, "MiB", path, title=title, ranges="least and most")


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    benchmark.parser.add_argument("--runs", type=int, default=3, help="runs of every side, for peaks")
    benchmark.run({"peaks": all_peaks}, facts={"model_mib": MODEL}, draw=draw)
