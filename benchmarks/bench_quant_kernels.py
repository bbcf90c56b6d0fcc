"""The compiled kernels of ddp-quant-hooks against a copy of memory and against torch operators.

    python benchmarks/bench_quant_kernels.py
    python benchmarks/bench_quant_kernels.py --mib 100 --repeats 51

One thread, one fp32 bucket of 25 MiB in 8 bits with blocks of 128; every repeat runs everything, in turns
forwards and backwards. Bytes are the least that must be moved per value: 4 read and 1.03 written to encode,
the reverse to decode, 8 to copy. Writes results/quant_kernels.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from timings import slowest

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from ddp_quant_hooks.kernels.job import Job

RESULTS = Path(__file__).parent / "results"
LAYOUT = Layout("int8", 128)
COPY = "tensor.copy_"
TORCH_OPS = "torch operators"


def jobs(count: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Return the calls to measure, with the bytes that each moves."""
    values, restored = torch.randn(count), torch.empty(count)
    size = LAYOUT.message_bytes(count)
    message = torch.empty(size, dtype=torch.uint8)
    encode = Job([count], values, (), LAYOUT, [message], LAYOUT)
    decode = Job([count], restored, [[message]], LAYOUT, (), LAYOUT)
    mean_of_2 = Job([count], restored, [[message, message]], LAYOUT, (), LAYOUT)
    shard = count // 4 // LAYOUT.block_size * LAYOUT.block_size
    part = torch.empty(LAYOUT.message_bytes(shard), dtype=torch.uint8)
    parts = [part.clone() for _ in range(4)]
    for one in parts:
        kernels.encode(values[:shard], one, LAYOUT)
    kernels.encode(values, message, LAYOUT)
    reduce = Job([shard], None, [parts], LAYOUT, [part], LAYOUT)
    found: dict[str, tuple[Callable[[], Any], float]] = {
        COPY: (lambda: restored.copy_(values), 8.0 * count),
        f"encode, {TORCH_OPS}": (lambda: torch_ops.run(encode), 4.0 * count + size),
        f"decode, {TORCH_OPS}": (lambda: torch_ops.run(decode), 4.0 * count + size),
    }
    for name in CpuKernels().available:
        run = CpuKernels(name).run
        found[f"ours: encode, {name}"] = (partial(run, encode), 4.0 * count + size)
        found[f"ours: decode, {name}"] = (partial(run, decode), 4.0 * count + size)
        found[f"ours: mean of 2, {name}"] = (partial(run, mean_of_2), 4.0 * count + 2 * size)
        found[f"ours: reduce a shard of 4, {name}"] = (partial(run, reduce), 5.0 * part.numel())
    return found


def measure(count: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Return times, bandwidths, and their share of the copy's bandwidth."""
    work = jobs(count)
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(-2, repeats):  # the first rounds warm up
        for name in list(work) if repeat % 2 else reversed(list(work)):
            began = time.perf_counter()
            work[name][0]()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    results = slowest([seconds])
    for name, entry in results.items():
        entry["gb_per_s"] = round(work[name][1] / entry["median_ms"] / 1e6, 2)
    for entry in results.values():
        entry["of_copy"] = round(entry["gb_per_s"] / results[COPY]["gb_per_s"], 2)
    return results


def report(results: dict[str, Any]) -> None:
    """Print the table, and how much faster the kernels are than torch operators."""
    kinds = results["kernels"]
    print(kernels.describe())
    for name, entry in kinds.items():
        low, high = entry["quartiles_ms"]
        print(
            f"  {name:<36}{entry['median_ms']:8.2f} ms [{low:.2f}, {high:.2f}]".ljust(68)
            + f"{entry['gb_per_s']:7.1f} GB/s  {entry['of_copy']:.2f} of copy_"
        )
    best = CpuKernels().instruction_set
    for what in ("encode", "decode"):
        ours = kinds[f"ours: {what}, {best}"]
        faster = kinds[f"{what}, {TORCH_OPS}"]["median_ms"] / ours["median_ms"]
        print(f"{what}, {best}: {faster:.0f} times as fast as torch operators")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=25)
    parser.add_argument("--repeats", type=int, default=101)
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.mib * 2**20 // 4
    results = {
        **describe_machine(),
        "bucket_mib": options.mib,
        "repeats": options.repeats,
        "kernels": measure(count, options.repeats),
    }
    report(results)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quant_kernels.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
