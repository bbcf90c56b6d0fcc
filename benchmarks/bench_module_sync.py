"""dist_utils.sync_module_states against PyTorch's function: two loopback ranks on Gloo, 200 parameters.

    python benchmarks/bench_module_sync.py

Times are of the slowest rank. "with verification" compares the ranks' modules first. Writes
results/module_sync.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import torch
import torch.distributed as dist
from harness import Benchmark, Found, in_turns, print_times, slowest
from torch.distributed import utils as pytorch

from dist_utils import sync_module_states
from dist_utils.testing import run_ranks

BUCKET = 250 << 20
WIDTHS = {512: "100.2 MiB", 64: "1.6 MiB", 4: "8 KiB"}
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
    return in_turns(sides, repeats)


def cases(options: Namespace) -> Iterator[Found]:
    """Measure models of several sizes."""
    for width, size in WIDTHS.items():
        times = slowest(run_ranks(measure, 2, width, options.repeats, timeout=300))
        print_times(f"200 parameters, {size}", times, lambda name: name.replace("ours", "pytorch"))
        yield ("ms", size), times


if __name__ == "__main__":
    Benchmark(__file__, __doc__, repeats=41).run({"ms": cases})
