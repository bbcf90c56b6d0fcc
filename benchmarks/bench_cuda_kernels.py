"""The CUDA kernels of ddp-quant-hooks against a copy of memory and against PyTorch's functions.

    python benchmarks/bench_cuda_kernels.py
    python benchmarks/bench_cuda_kernels.py --mib 256 --milliseconds 200

One fp32 bucket in 8 bits with blocks of 128, timed by CUDA events; medians over as many calls as fit into the
time. The L2 cache is overwritten before every call. Bytes are the least that must be moved per value: 4 read
and 1.03 written to encode, the reverse to decode, (W + 1) x 1.03 to reduce W ranks, 8 to copy. Writes
results/cuda_kernels.json; without a GPU it says so and writes nothing.
"""

from __future__ import annotations

import importlib
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from harness import Benchmark, Found, gpu_name, print_times, spread

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout

LAYOUT = Layout("int8", 128)
CHANNEL = 512
COPY = "tensor.copy_"
PYTORCH = "PyTorch"
PYTORCHS_MOST_VALUES = 25 * 2**20 // 4
"""With more values its functions take half a second or more, because they launch a kernel per channel."""
BUSY_CYCLES = 1_000_000
"""About half a millisecond: longer than the host takes to launch a kernel."""

Job = tuple[Callable[[], Any], float]


def jobs(count: int) -> dict[str, Job]:
    """Return the calls to measure, with the bytes that each must move."""
    values = torch.randn(count, device="cuda")
    restored = torch.empty_like(values)
    size = LAYOUT.message_bytes(count)
    messages = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2)]
    for message in messages:
        kernels.encode(values, message, LAYOUT)
    residual, lost = (torch.zeros_like(values, dtype=torch.bfloat16) for _ in range(2))
    found: dict[str, Job] = {
        COPY: (lambda: restored.copy_(values), 8.0 * count),
        "ours: encode": (lambda: kernels.encode(values, messages[0], LAYOUT), 4.0 * count + size),
        "ours: encode, error feedback": (
            lambda: kernels.encode(values, messages[0], LAYOUT, residual=residual, new_residual=lost),
            8.0 * count + size,  # residuals are bf16
        ),
        "ours: decode": (lambda: kernels.decode(messages[:1], LAYOUT, restored), 4.0 * count + size),
        "ours: mean of 2": (lambda: kernels.decode(messages, LAYOUT, restored), 4.0 * count + 2 * size),
    }
    half = values.bfloat16()
    found["ours: encode, bf16"] = (
        lambda: kernels.encode(half, messages[0], LAYOUT),
        2.0 * count + size,
    )
    turned = replace(LAYOUT, rotate=True)
    found["ours: encode, rotation"] = (
        lambda: kernels.encode(values, messages[0], turned),
        4.0 * count + size,
    )
    for ranks in (2, 8):
        found[f"ours: reduce, W = {ranks}"] = _reduce(count, ranks, LAYOUT)
        found[f"ours: reduce, W = {ranks}, rotation"] = _reduce(count, ranks, turned)
    found.update(_affine(values, restored))
    return found


def _reduce(count: int, ranks: int, layout: Layout) -> Job:
    shard = count // ranks // layout.block_size * layout.block_size
    size = layout.message_bytes(shard)
    values = torch.randn(shard, device="cuda")
    messages = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(ranks)]
    for message in messages:
        kernels.encode(values, message, layout)
    mean = torch.empty_like(messages[0])
    return lambda: kernels.reduce(messages, layout, shard, mean, layout), (ranks + 1.0) * size


def _affine(values: torch.Tensor, restored: torch.Tensor) -> dict[str, Job]:
    """Return PyTorch's functions beside ours, which take the same numbers."""
    count = values.numel()
    layout = AffineLayout(count, CHANNEL, torch.float32)
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8, device="cuda")
    kernels.affine_encode(values, message, layout)
    found: dict[str, Job] = {
        "ours: affine encode, per channel": (
            lambda: kernels.affine_encode(values, message, layout),
            4.0 * count + message.numel(),
        ),
        "ours: affine decode, per channel": (
            lambda: kernels.affine_decode([message], layout, restored),
            4.0 * count + message.numel(),
        ),
    }
    theirs = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks")
    encode = getattr(theirs, "_quantize_per_channel_backend", None)
    decode = getattr(theirs, "_dequantize_per_channel_backend", None)
    if encode is None or decode is None or count > PYTORCHS_MOST_VALUES:
        return found
    rows = values[: count // CHANNEL * CHANNEL].view(-1, CHANNEL)
    scales, zero_points = (part[: len(rows)] for part in layout.parameters(message))
    numbers = encode(rows[:64], scales, zero_points).repeat(-(-len(rows) // 64), 1)[: len(rows)]
    found[f"{PYTORCH}: encode, per channel"] = (lambda: encode(rows, scales, zero_points), 5.0 * count)
    found[f"{PYTORCH}: decode, per channel"] = (lambda: decode(numbers, scales, zero_points), 5.0 * count)
    return found


def time_calls(call: Callable[[], Any], milliseconds: float, cache: torch.Tensor) -> list[float]:
    """Return the seconds of single calls on the GPU, until they have taken ``milliseconds`` in total.

    The GPU is kept busy while the host launches, so only its own time is measured; see host_microseconds.
    """
    call()
    torch.cuda.synchronize()
    seconds: list[float] = []
    while len(seconds) < 3 or (sum(seconds) * 1e3 < milliseconds and len(seconds) < 200):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        cache.zero_()
        torch.cuda._sleep(BUSY_CYCLES)  # noqa: SLF001 - as torch's own tests
        began.record()
        call()
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    return seconds


def host_microseconds(call: Callable[[], Any]) -> float:
    """Return the median time of 100 calls on the host's thread, which waits for nothing."""
    seconds: list[float] = []
    torch.cuda.synchronize()
    for _ in range(100):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
        torch.cuda.synchronize()
    return 1e6 * statistics.median(seconds)


def measure(mib: int, milliseconds: float) -> dict[str, dict[str, Any]]:
    """Return times, bandwidths, and the time of a copy that moves as many bytes."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    results: dict[str, dict[str, Any]] = {}
    count = mib * 2**20 // 4
    source, target = (torch.ones(2 * count, device="cuda") for _ in range(2))
    for name, (call, moved) in jobs(count).items():
        copied = round(moved / 8)
        copy = time_calls(partial(target[:copied].copy_, source[:copied]), milliseconds, cache)
        times = [1e3 * seconds for seconds in time_calls(call, milliseconds, cache)]
        median = statistics.median(times)
        results[name] = {
            **spread(times, digits=4),
            "gb_per_s": round(moved / median / 1e6, 1),
            "copy_ms": round(1e3 * statistics.median(copy), 4),
            "of_copy": round(1e3 * statistics.median(copy) / median, 3),
            **({} if median > 1 else {"host_us": round(host_microseconds(call), 1)}),
        }
    return results


def buckets(options: Namespace) -> Iterator[Found]:
    """Measure every size."""
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    torch.manual_seed(0)
    print(kernels.describe())
    for mib in options.mib:
        results = measure(mib, options.milliseconds)
        print_times(f"{mib} MiB of fp32", results, theirs_of)
        for name, entry in results.items():
            bandwidth = f"{entry['gb_per_s']:8.1f} GB/s, {entry['of_copy']:.2f} of copy_"
            print(f"  {name:<36}{bandwidth}  {entry.get('host_us', 0):6.1f} us of the host")
        yield ("buckets", f"{mib} MiB"), results


def theirs_of(name: str) -> str:
    """Return the name of the PyTorch function that gives the same numbers."""
    return name.replace("ours: affine", f"{PYTORCH}:")


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__)
    benchmark.parser.add_argument("--mib", type=int, nargs="+", default=[256, 25, 1])
    benchmark.parser.add_argument("--milliseconds", type=float, default=100.0, help="of calls, for each row")
    facts = {"gpu": gpu_name(), "kernels": kernels.describe().splitlines()}
    benchmark.run({"buckets": buckets}, facts=facts)
