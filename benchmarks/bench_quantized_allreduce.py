"""The quantized hooks against fp32 and 16-bit averaging: time on loopback and slow links, bytes, memory.

    python benchmarks/bench_quantized_allreduce.py              # everything, some minutes; hosts need root
    python benchmarks/bench_quantized_allreduce.py time --world-sizes 2 --repeats 5

One 25 MiB bucket of fp32 on Gloo. Writes results/quantized_allreduce.json and .png beside this file.
Times are of the slowest rank, from the hook's call until the mean is in the bucket; every repeat runs all
hooks, in turns forwards and backwards. PyTorch 2.13's own quantization hooks raise on Gloo, so only their
counterpart here is measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bar_charts import bars_of, draw_bars
from emulated_hosts import EmulationUnavailableError
from hook_harness import (
    ELEMENTS,
    Hooks,
    be_a_rank,
    measure_memory,
    measure_time,
    real_bucket,
    time_on_hosts,
)
from machine import describe_machine
from timings import slowest

from ddp_compress_hooks import CompressState, allreduce_hook, bf16_compress_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks, tcp_bytes_sent

RESULTS = Path(__file__).parent / "results"
PLAIN, HALF, QUANTIZED = "fp32, allreduce_hook", "16 bits, bf16_compress_hook", "ours: 8 bits"
STATES: dict[str, dict[str, Any]] = {
    QUANTIZED: {},
    "ours: 8 bits, gather fp16": {"gather": "fp16"},
    "ours: 8 bits, error feedback shard": {"error_feedback": "shard"},
    "ours: 8 bits, error feedback both": {"error_feedback": "both"},
    "ours: 4 bits, no error feedback": {"bits": 4, "error_feedback": "none"},
    "ours: 4 bits": {"bits": 4},
}
AFFINE = ("ours: perchannel hook", "ours: pertensor hook")
RATES = {"1gbit": 1e9 / 8, "10gbit": 10e9 / 8}
"""Bytes a second of the emulated links."""


def hooks() -> Hooks:
    """Return every hook to measure."""
    found: dict[str, Any] = {
        PLAIN: lambda bucket: allreduce_hook(None, bucket),
        HALF: lambda bucket: bf16_compress_hook(None, bucket),
    }
    fp32_sum = CompressState(accumulate="fp32")
    found["16 bits, sum in fp32"] = lambda bucket: bf16_compress_hook(fp32_sum, bucket)
    for name, options in STATES.items():
        state = QuantizedAllreduceState(**options)
        found[name] = lambda bucket, state=state: quantized_allreduce_hook(state, bucket)
    found["ours: perchannel hook"] = lambda bucket: quantization_perchannel_hook(None, bucket)
    found["ours: pertensor hook"] = lambda bucket: quantization_pertensor_hook(None, bucket)
    return found


def wire_limit_ms(world_size: int, rate: str) -> float:
    """Return the ms for sending one byte per value over the link, 2 (W - 1) / W times per rank."""
    return 1e3 * 2 * (world_size - 1) / world_size * ELEMENTS / RATES[rate]


def count_bytes(_: int) -> dict[str, int]:
    """Return the bytes that every hook sends on this rank's connections."""
    bucket, sent = real_bucket(), {}
    for name, hook in hooks().items():
        bucket.set_buffer(torch.ones(1000))
        hook(bucket).wait()  # connects
        bucket.set_buffer(torch.randn(ELEMENTS))
        dist.barrier()
        before = tcp_bytes_sent()
        hook(bucket).wait()
        dist.barrier()
        sent[name] = tcp_bytes_sent() - before
    return sent


def measure_small(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of fp32 and of 8 bits for buckets of 4 KiB to 4 MiB, to see where 8 bits pay off."""
    del rank
    bucket, state = real_bucket(), QuantizedAllreduceState(min_bytes=0)
    seconds: dict[str, list[float]] = {}
    for kib in (4, 16, 64, 256, 1024, 4096):
        buffer = torch.randn(kib * 256)
        bucket.set_buffer(buffer)
        for repeat in range(-2, repeats):
            pair = [("fp32", None), ("8 bits", state)]
            for name, with_state in pair if repeat % 2 else reversed(pair):
                dist.barrier()
                began = time.perf_counter()
                if with_state is None:
                    allreduce_hook(None, bucket).wait()
                else:
                    quantized_allreduce_hook(with_state, bucket).wait()
                if repeat >= 0:
                    seconds.setdefault(f"{kib} KiB, {name}", []).append(time.perf_counter() - began)
    return seconds


def report(results: dict[str, Any]) -> None:
    """Print the results."""
    for size, times in results.get("loopback", {}).items():
        report_times(f"{size} ranks, loopback", times, None)
    for rate, by_size in results.get("hosts", {}).items():
        for size, times in by_size.items():
            report_times(f"{size} hosts, {rate}", times, wire_limit_ms(size, rate))
    for size, times in results.get("small", {}).items():
        print(f"\n{size} ranks, loopback, small buckets: ms")
        print("\n".join(f"  {name:<24}{entry['median_ms']:8.2f}" for name, entry in times.items()))
    for size, sent in results.get("bytes", {}).items():
        print(f"\n{size} ranks: MiB sent by rank 0 as counted by the kernel, and share of fp32")
        for name, count in sent.items():
            print(f"  {name:<38}{count / 2**20:8.2f}{count / sent[PLAIN]:8.3f}")
    for size, memory in results.get("memory_mib", {}).items():
        print(f"\n{size} ranks: extra peak memory of the worst rank, MiB")
        for name, mib in memory.items():
            print(f"  {name:<38}{mib:8.1f}")


def report_times(title: str, times: dict[str, Any], limit: float | None) -> None:
    """Print one set of times, and their ratios to fp32, 16 bits and the wire's limit."""
    plain, half = times[PLAIN]["median_ms"], times[HALF]["median_ms"]
    print(f"\n{title}: ms, median [quartiles]; times faster than fp32, than 16 bits; of the wire's limit")
    for name, entry in times.items():
        low, high = entry["quartiles_ms"]
        middle = entry["median_ms"]
        share = "" if limit is None else f"{middle / limit:8.2f}"
        print(
            f"  {name:<38}{middle:8.1f} [{low:.1f}, {high:.1f}]".ljust(66)
            + f"{plain / middle:6.2f}x {half / middle:6.2f}x{share}"
        )


SHOWN = ("fp32, allreduce_hook", "16 bits, bf16_compress_hook", "ours: 8 bits", "ours: 4 bits")


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times of the hooks that are compared with each other, between two ranks."""
    tables = {"ranks, loopback": results.get("loopback", {})}
    for rate, by_size in results.get("hosts", {}).items():
        tables[f"emulated hosts, {rate.replace('gbit', ' Gbit/s')}"] = by_size
    panels = {
        f"2 {where}": bars_of({name: table["2"][name] for name in SHOWN if name in table["2"]})
        for where, table in tables.items()
        if "2" in table
    }
    if panels:
        draw_bars(panels, "ms", path, title="Averaging a bucket of 25 MiB")


def main() -> None:
    """Run the chosen parts, and print and store their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["time", "small", "bytes", "memory", "hosts"]
    parser.add_argument("part", nargs="?", choices=["all", *parts, "plot", "rank"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, for the quartiles")
    if options.part == "rank":
        be_a_rank(options.folder, hooks, options.repeats)
        return
    if options.part == "plot":
        stored = json.loads((RESULTS / "quantized_allreduce.json").read_text())
        draw(stored, RESULTS / "quantized_allreduce.png")
        return
    wants = {options.part} if options.part != "all" else set(parts)
    results = measure(wants, options.world_sizes, options.repeats)
    report(results)
    if options.part == "all":
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "quantized_allreduce.json").write_text(json.dumps(results, indent=1) + "\n")
        draw(results, RESULTS / "quantized_allreduce.png")
        print(f"\nwritten: {RESULTS / 'quantized_allreduce.json'} and .png")
    elif options.part == "hosts" and "hosts" not in results:
        raise SystemExit(1)


def measure(wants: set[str], sizes: list[int], repeats: int) -> dict[str, Any]:
    """Measure the wanted parts."""
    results: dict[str, Any] = {
        **describe_machine(),
        "bucket_mib": ELEMENTS * 4 / 2**20,
        "repeats": repeats,
    }
    if "time" in wants:
        results["loopback"] = {
            size: slowest(run_ranks(measure_time, size, hooks, repeats, timeout=900)) for size in sizes
        }
    if "small" in wants:
        results["small"] = {
            size: slowest(run_ranks(measure_small, size, repeats, timeout=300)) for size in sizes
        }
    if "bytes" in wants:
        results["bytes"] = {size: run_ranks(count_bytes, size, timeout=300)[0] for size in [*sizes, 8]}
    if "memory" in wants:
        results["memory_mib"] = {
            size: {
                name: round(max(run_ranks(measure_memory, size, hooks, name, timeout=120)), 1)
                for name in (PLAIN, HALF, *STATES, *AFFINE)
            }
            for size in sizes
        }
    if "hosts" in wants:
        try:
            results["hosts"] = {
                rate: {size: time_on_hosts(__file__, size, repeats, rate=rate) for size in sizes}
                for rate in RATES
            }
        except EmulationUnavailableError as error:
            print(f"SKIPPED the emulated hosts: {error}", file=sys.stderr)
    return results


if __name__ == "__main__":
    main()
