"""One bucket among many ranks: 8 bits against fp32 around Gloo's ring, and what up to 1,024 ranks would send.

    python benchmarks/bench_many_ranks.py              # ten minutes on a machine with a core for each rank
    python benchmarks/bench_many_ranks.py cases --worlds 2 4 --repeats 3
    python benchmarks/bench_many_ranks.py counted      # on any machine

Times: buckets of 64 KiB to 25 MiB among 2 to 16 ranks of one machine, on loopback, sides in turns. Counted:
the bytes and messages in the plans of all ranks for 25 MiB, which are made without communication. Writes
results/many_ranks.json: of the slowest rank, in seconds, the quartiles and the fastest repeat, because other
programs on a machine only add time.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator

from buckets import ELEMENTS, Hooks, time_hooks
from harness import Benchmark, Found, of_slowest

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.exchange.placement import Placement
from ddp_quant_hooks.exchange.plan import Formats
from ddp_quant_hooks.exchange.planner import plan_average
from ddp_quant_hooks.kernels import Layout
from dist_utils.testing import run_ranks

KIB = 1 << 10
SIZES = {64 * KIB: 4, KIB * KIB: 4, 4 * KIB * KIB: 4, 25 * KIB * KIB: 1}
"""Bytes of buckets, and multiples of the repeats: small buckets take little time."""
COUNTED = ((8, 8), (16, 2), (16, 16), (32, 4), (256, 32), (1024, 128), (1024, 1024))
"""Ranks and hosts."""
FORMATS = Formats(Layout("int8", 128, rotate=True), Layout("int8", 128, rotate=True), 4)
"""The default state's, with gradients in fp32."""


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


def count(ranks: int, hosts: int) -> dict[str, float]:
    """Return the bytes a value on the busiest host's link, their limit, and the most messages of a rank."""
    host_of = tuple(rank * hosts // ranks for rank in range(ranks))
    placement = Placement(host_of, "full")
    sent, received, most_messages = Counter[int](), Counter[int](), 0
    for rank in range(ranks):
        plan = plan_average(placement, rank, ELEMENTS, FORMATS)
        messages = [message for chunk in plan.chunks for message in chunk.sends(FORMATS) if message[1]]
        most_messages = max(most_messages, len(messages))
        for to, size in messages:
            if host_of[to] != host_of[rank]:
                sent[host_of[rank]] += size
                received[host_of[to]] += size
    busiest = max(*sent.values(), *received.values())
    return {
        "bytes_a_value": round(busiest / ELEMENTS, 2),
        "limit": round(2 * (hosts - 1) / hosts, 2),
        "messages": most_messages,
    }


def counted(_: Namespace) -> Iterator[Found]:
    """Count for each number of ranks and hosts."""
    for ranks, hosts in COUNTED:
        found = count(ranks, hosts)
        print(f"{ranks} ranks on {hosts} hosts: {found}", flush=True)
        yield ("counted", f"{ranks} ranks, {hosts} hosts"), found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=9)
    benchmark.parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16])
    benchmark.run({"cases": cases, "counted": counted})
