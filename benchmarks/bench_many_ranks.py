"""One bucket among 2 to 16 ranks of one machine: 8 bits against fp32 around Gloo's ring.

    python benchmarks/bench_many_ranks.py              # ten minutes on a machine with a core for each rank
    python benchmarks/bench_many_ranks.py --worlds 2 4 --repeats 3

Buckets of 64 KiB to 25 MiB on loopback, sides in turns. Writes results/many_ranks.json: of the slowest rank,
in seconds, the quartiles and the fastest repeat, because other programs on a machine only add time.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Iterator

from buckets import Hooks, time_hooks
from harness import Benchmark, Found, of_slowest

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import run_ranks

KIB = 1 << 10
SIZES = {64 * KIB: 4, KIB * KIB: 4, 4 * KIB * KIB: 4, 25 * KIB * KIB: 1}
"""Bytes of buckets, and multiples of the repeats: small buckets take little time."""


def hooks() -> Hooks:
    """Return both hooks."""
    state = QuantizedAllreduceState(min_bytes=0)
    return {
        "fp32 ring": lambda bucket: allreduce_hook(None, bucket),
        "8 bits": lambda bucket: quantized_allreduce_hook(state, bucket),
    }


def measure(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return this rank's seconds of every repeat, by side and size."""
    return {
        f"{name}, {size}": seconds
        for size, multiple in SIZES.items()
        for name, seconds in time_hooks(rank, hooks, multiple * repeats, size // 4).items()
    }


def cases(options: Namespace) -> Iterator[Found]:
    """Measure each number of ranks."""
    for world in options.worlds:
        case, found = f"{world} ranks, loopback", {}
        for name, times in of_slowest(run_ranks(measure, world, options.repeats, timeout=900)).items():
            quartiles = statistics.quantiles([time / 1e3 for time in times], n=4, method="inclusive")
            found[name] = {"fastest": min(times) / 1e3, "quartiles": quartiles}
            print(f"{case}, {name:<24}{min(times):8.2f} ms, median {1e3 * quartiles[1]:8.2f}", flush=True)
        yield ("cases", case), found


def main() -> None:
    """Measure, print and store."""
    benchmark = Benchmark(__file__, __doc__, repeats=9)
    benchmark.parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16])
    benchmark.run({"cases": cases})


if __name__ == "__main__":
    main()
