"""dist_utils.sync_module_states against PyTorch's function: two loopback ranks on Gloo, 200 parameters.

    python benchmarks/bench_module_sync.py

Every repeat runs all functions, in turns forwards and backwards; times are of the slowest rank. "with
verification" compares the ranks' modules first. Writes results/module_sync.json beside this
file.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine
from timings import slowest
from torch.distributed import utils as pytorch

from dist_utils import sync_module_states
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "module_sync.json"
BUCKET = 250 << 20
WIDTHS = [512, 64, 4]
"""Each model has 200 parameters: 100 square matrices of this width and 100 vectors."""


class Layers(torch.nn.Module):
    """Alternating matrices and vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(
            torch.randn(shape) for _ in range(100) for shape in ((width, width), (width,))
        )


def measure(rank: int, width: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every run of every function."""
    torch.manual_seed(rank)
    module = Layers(width)
    group = dist.group.WORLD
    assert group is not None
    parameters = list(module.parameters())

    def theirs_verified() -> None:
        pytorch._verify_param_shape_across_processes(group, parameters)  # noqa: SLF001 - it is compared
        pytorch._sync_module_states(module, group, BUCKET, 0, ())  # noqa: SLF001

    sides = {
        "ours": lambda: sync_module_states(module, group, BUCKET, 0, (), verify=False),
        "pytorch": lambda: pytorch._sync_module_states(module, group, BUCKET, 0, ()),  # noqa: SLF001
        "ours, with verification": lambda: sync_module_states(module, group, BUCKET, 0, ()),
        "pytorch, with verification": theirs_verified,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-2, repeats):  # the first rounds warm up
        for name in list(sides) if repeat % 2 else reversed(sides):
            dist.barrier()
            began = time.perf_counter()
            sides[name]()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure everything, print and store it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    results: dict[str, Any] = {**describe_machine(), "repeats": options.repeats, "ms": {}}
    for width in WIDTHS:
        table = slowest(run_ranks(measure, 2, width, options.repeats, timeout=300))
        kib = 100 * (width * width + width) * 4 / 2**10
        size = f"{kib:.0f} KiB" if kib < 2**10 else f"{kib / 2**10:.1f} MiB"
        results["ms"][size] = table
        print(f"\n200 parameters, {size}: ms, median [quartiles]")
        for name, entry in table.items():
            low, high = entry["quartiles_ms"]
            ratio = entry["median_ms"] / table[name.replace("ours", "pytorch")]["median_ms"]
            print(f"  {name:<28}{entry['median_ms']:7.2f} [{low:.2f}, {high:.2f}]   / pytorch {ratio:.2f}")
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten: {RESULTS}")


if __name__ == "__main__":
    main()
