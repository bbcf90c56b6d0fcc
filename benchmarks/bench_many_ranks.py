"""One bucket among 2 to 16 ranks of one machine: 8 bits against fp32 around Gloo's ring.

    python benchmarks/bench_many_ranks.py              # ten minutes on a machine with a core for each rank
    python benchmarks/bench_many_ranks.py --worlds 2 4 --repeats 3

Buckets of 64 KiB to 25 MiB on loopback, sides in turns. Writes results/many_ranks.json: of the slowest rank,
in seconds, the quartiles and the fastest repeat, because other programs on a machine only add time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import grad_bucket, run_ranks

FILE = Path(__file__).parent / "results" / "many_ranks.json"
KIB = 1 << 10
SIZES = [64 * KIB, KIB * KIB, 4 * KIB * KIB, 25 * KIB * KIB]
SHORT = 4 * KIB * KIB
"""Buckets of up to this many bytes take little time, and are measured more often."""


def measure(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return this rank's seconds of every repeat, by side and size."""
    torch.set_num_threads(1)
    state = QuantizedAllreduceState(min_bytes=0)
    sides: dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]] = {
        "fp32 ring": lambda bucket: allreduce_hook(None, bucket),
        "8 bits": lambda bucket: quantized_allreduce_hook(state, bucket),
    }
    seconds: dict[str, list[float]] = {}
    for size in SIZES:
        bucket = grad_bucket([torch.zeros(size // 4)])
        source = torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))
        for repeat in range(-2, repeats * (1 if size > SHORT else 4)):
            for name in sides if repeat % 2 else reversed(sides):
                bucket.buffer().copy_(source)
                dist.barrier()
                began = time.perf_counter()
                sides[name](bucket).wait()
                if repeat >= 0:
                    seconds.setdefault(f"{name}, {size}", []).append(time.perf_counter() - began)
    return seconds


def summarize(ranks: list[dict[str, list[float]]]) -> dict[str, dict[str, Any]]:
    """Return the slowest rank's times."""
    found = {}
    for name in ranks[0]:
        times = [max(repeat) for repeat in zip(*(rank[name] for rank in ranks), strict=True)]
        quartiles = statistics.quantiles(times, n=4, method="inclusive")
        found[name] = {"fastest": min(times), "quartiles": quartiles}
        print(f"  {name:<24}{1e3 * min(times):8.2f} ms, median {1e3 * quartiles[1]:8.2f}", flush=True)
    return found


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=9, help="at least 2")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    results: dict[str, Any] = {**describe_machine(), "repeats": options.repeats, "cases": {}}
    for world in options.worlds:
        name = f"{world} ranks, loopback"
        print(name)
        results["cases"][name] = summarize(run_ranks(measure, world, options.repeats, timeout=900))
    options.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"written: {options.output}")


if __name__ == "__main__":
    main()
