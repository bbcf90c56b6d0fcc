"""The compiled kernels of ddp-quant-hooks against a copy of memory and against torch operators.

    python benchmarks/bench_quant_kernels.py
    python benchmarks/bench_quant_kernels.py --mib 100 --repeats 51

One thread, one fp32 bucket of 25 MiB in 8 bits with blocks of 128: normal values, or heavy tails, Student's t
with 3 degrees of freedom. Only the rows "rotate" rotate blocks with a few large values, which is the hooks'
default. Bytes are the least that must be moved per value: 4 read and 1.03 written to encode, the reverse to
decode, 8 to copy. Writes results/quant_kernels.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Benchmark, Found, in_turns, print_times, slowest

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, torch_ops
from ddp_quant_hooks.kernels.call import KernelCall
from ddp_quant_hooks.kernels.cpu import CpuKernels

LAYOUT = Layout("int8", 128)
ROTATED = replace(LAYOUT, rotate=True)
COPY = "tensor.copy_"
TORCH_OPS = "torch operators"


def jobs(count: int) -> dict[str, tuple[Callable[[], Any], float]]:
    """Return the calls to measure, with the bytes that each moves."""
    values, restored = torch.randn(count), torch.empty(count)
    size = LAYOUT.message_bytes(count)
    message, other = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
    encode = KernelCall([count], values, (), LAYOUT, [message], LAYOUT)
    rotate = KernelCall([count], values, (), ROTATED, [other], ROTATED)
    heavy_tails = torch.distributions.StudentT(3.0).sample((count,))
    rotate_heavy = KernelCall([count], heavy_tails, (), ROTATED, [other], ROTATED)
    decode = KernelCall([count], restored, [[message]], LAYOUT, (), LAYOUT)
    mean_of_2 = KernelCall([count], restored, [[message, other]], LAYOUT, (), LAYOUT)
    shard = count // 4 // LAYOUT.block_size * LAYOUT.block_size
    part = torch.empty(LAYOUT.message_bytes(shard), dtype=torch.uint8)
    parts = [part.clone() for _ in range(4)]
    for one in parts:
        kernels.encode(values[:shard], one, LAYOUT)
    for one in (message, other):
        kernels.encode(values, one, LAYOUT)
    reduce = KernelCall([shard], None, [parts], LAYOUT, [part], LAYOUT)
    found: dict[str, tuple[Callable[[], Any], float]] = {
        COPY: (lambda: restored.copy_(values), 8.0 * count),
        f"encode, {TORCH_OPS}": (lambda: torch_ops.run(encode), 4.0 * count + size),
        f"decode, {TORCH_OPS}": (lambda: torch_ops.run(decode), 4.0 * count + size),
    }
    for name in CpuKernels().available:
        run = CpuKernels(name).run
        found[f"ours: encode, {name}"] = (partial(run, encode), 4.0 * count + size)
        found[f"ours: encode, rotate, {name}"] = (partial(run, rotate), 4.0 * count + size)
        found[f"ours: encode, rotate, heavy tails, {name}"] = (partial(run, rotate_heavy), 4.0 * count + size)
        found[f"ours: decode, {name}"] = (partial(run, decode), 4.0 * count + size)
        found[f"ours: mean of 2, {name}"] = (partial(run, mean_of_2), 4.0 * count + 2 * size)
        found[f"ours: reduce a shard of 4, {name}"] = (partial(run, reduce), 5.0 * part.numel())
    return found


def measure(count: int, repeats: int) -> dict[str, dict[str, Any]]:
    """Return times, bandwidths, and their share of the copy's bandwidth."""
    work = jobs(count)
    results = slowest([in_turns({name: call for name, (call, _) in work.items()}, repeats)])
    for name, entry in results.items():
        entry["gb_per_s"] = round(work[name][1] / entry["median_ms"] / 1e6, 2)
    for entry in results.values():
        entry["of_copy"] = round(entry["gb_per_s"] / results[COPY]["gb_per_s"], 2)
    return results


def torch_ops_of(name: str) -> str:
    """Return the name of the same work with torch operators."""
    return f"{name.removeprefix('ours: ').split(',')[0]}, {TORCH_OPS}"


def kernels_alone(options: Namespace) -> Iterator[Found]:
    """Measure all jobs on one bucket."""
    print(kernels.describe())
    results = measure(options.mib * 2**20 // 4, options.repeats)
    print_times(f"{options.mib} MiB", results, torch_ops_of)
    for name, entry in results.items():
        print(f"  {name:<36}{entry['gb_per_s']:7.1f} GB/s  {entry['of_copy']:.2f} of copy_")
        yield ("kernels", name), entry


if __name__ == "__main__":
    torch.set_num_threads(1)
    benchmark = Benchmark(__file__, __doc__, repeats=101)
    benchmark.parser.add_argument("--mib", type=int, default=25)
    benchmark.run({"kernels": kernels_alone})
