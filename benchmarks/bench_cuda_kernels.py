"""The CUDA kernels of ddp-quant-hooks against a copy of memory, PyTorch's functions, and torchft's kernels.

    python benchmarks/bench_cuda_kernels.py
    python benchmarks/bench_cuda_kernels.py --mib 256 --milliseconds 200

One fp32 bucket in 8 bits with blocks of 128, timed by CUDA events; medians over as many calls as fit into the
time. The L2 cache is overwritten before every call. Bytes are the least that must be moved per value: 4 read
and 1.03 written to encode, the reverse to decode, (W + 1) x 1.03 to reduce W ranks, 8 to copy. torchft (fp8
or int8, one scale per row) gets rows of 512. Writes results/cuda_kernels.json beside this file; without
a GPU it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout

RESULTS = Path(__file__).parent / "results"
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
    found.update(_torchft(values))
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


def _torchft(values: torch.Tensor) -> dict[str, Job]:
    if importlib.util.find_spec("torchft") is None:
        return {}
    theirs = importlib.import_module("torchft.quantization")
    count, ranks = values.numel() // CHANNEL * CHANNEL, 8
    rows = values[:count].view(-1, CHANNEL)
    message = theirs.fused_quantize_into_fp8([rows], ranks)
    return {
        "torchft: encode": (
            lambda: theirs.fused_quantize_into_fp8([rows], ranks),
            4.0 * count + len(message),
        ),
        "torchft: decode": (
            lambda: theirs.fused_dequantize_from_fp8([rows], message, ranks),
            4.0 * count + len(message),
        ),
        f"torchft: reduce, W = {ranks}": (
            lambda: theirs.fused_reduce_fp8([rows], message, ranks, 0),
            len(message) * (ranks + 1.0) / ranks,
        ),
    }


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
        low, median, high = statistics.quantiles(time_calls(call, milliseconds, cache), n=4)
        host = {} if median > 1e-3 else {"host_us": round(host_microseconds(call), 1)}
        results[name] = {
            "median_ms": round(1e3 * median, 4),
            "quartiles_ms": [round(1e3 * low, 4), round(1e3 * high, 4)],
            "gb_per_s": round(moved / median / 1e9, 1),
            "copy_ms": round(1e3 * statistics.median(copy), 4),
            "of_copy": round(statistics.median(copy) / median, 3),
            **host,
        }
    return results


def report(mib: int, results: dict[str, Any]) -> None:
    """Print the table, and how much faster the kernels are than PyTorch's functions."""
    print(f"{mib} MiB of fp32")
    for name, entry in results.items():
        low, high = entry["quartiles_ms"]
        print(
            f"  {name:<36}{entry['median_ms']:9.4f} ms [{low:.4f}, {high:.4f}]".ljust(70)
            + f"{entry['gb_per_s']:8.1f} GB/s  {entry['of_copy']:.2f} of copy_"
            + f"  {entry.get('host_us', 0):6.1f} us of the host"
        )
    for what in ("encode", "decode"):
        theirs = results.get(f"{PYTORCH}: {what}, per channel")
        if theirs is not None:
            times = theirs["median_ms"] / results[f"ours: affine {what}, per channel"]["median_ms"]
            print(f"{what}: {times:.0f} times as fast as PyTorch's per channel")


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, nargs="+", default=[256, 25, 1])
    parser.add_argument("--milliseconds", type=float, default=100.0, help="of calls, for each row")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing is measured, nothing is written")
        return
    torch.manual_seed(0)
    print(kernels.describe())
    results = {mib: measure(mib, options.milliseconds) for mib in options.mib}
    for mib, entries in results.items():
        report(mib, entries)
    found = {
        **describe_machine(),
        "gpu": torch.cuda.get_device_name(),
        "kernels": kernels.describe().splitlines(),
        "buckets": {f"{mib} MiB": entries for mib, entries in results.items()},
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "cuda_kernels.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
