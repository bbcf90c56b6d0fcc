"""The quantized hooks against fp32 and 16-bit averaging: time on loopback and slow links, bytes, memory.

    python benchmarks/bench_quantized_allreduce.py              # everything, some minutes; hosts need root
    python benchmarks/bench_quantized_allreduce.py loopback --world-sizes 2 --repeats 5

One 25 MiB bucket of fp32 on Gloo. Times are of the slowest rank, from the hook's call until the mean is in
the bucket. fp32 is PyTorch's ``allreduce_hook``, which does what DDP does without a hook. PyTorch 2.13's
own quantization hooks raise on Gloo, so only their counterpart here is measured.
Writes results/quantized_allreduce.json and .png.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from buckets import ELEMENTS, Hooks, memory_of_hooks, real_bucket, times_of_hooks
from drawing import bars_of, draw_bars
from harness import Benchmark, Found
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_compress_hooks import CompressState, bf16_compress_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
    quantized_allreduce_hook,
)
from dist_utils.testing import run_ranks, tcp_bytes_sent

PLAIN, HALF, QUANTIZED = "fp32, allreduce_hook", "16 bits, bf16_compress_hook", "ours: 8 bits"
STATES: dict[str, dict[str, Any]] = {
    QUANTIZED: {},
    "ours: 8 bits, gather fp16": {"gather": "fp16"},
    "ours: 8 bits, error feedback shard": {"error_feedback": "shard"},
    "ours: 8 bits, error feedback both": {"error_feedback": "both"},
    "ours: 4 bits, no error feedback": {"bits": 4, "error_feedback": "none"},
    "ours: 4 bits": {"bits": 4},
}
AFFINE = {
    "ours: perchannel hook": quantization_perchannel_hook,
    "ours: pertensor hook": quantization_pertensor_hook,
}
RATES = ["1gbit", "10gbit"]


def hooks() -> Hooks:
    """Return every hook to measure."""
    found: dict[str, Any] = {
        PLAIN: lambda bucket: allreduce_hook(dist.group.WORLD, bucket),
        HALF: lambda bucket: bf16_compress_hook(None, bucket),
    }
    fp32_sum = CompressState(accumulate="fp32")
    found["16 bits, sum in fp32"] = lambda bucket: bf16_compress_hook(fp32_sum, bucket)
    for name, options in STATES.items():
        state = QuantizedAllreduceState(**options)
        found[name] = lambda bucket, state=state: quantized_allreduce_hook(state, bucket)
    for name, hook in AFFINE.items():
        found[name] = lambda bucket, hook=hook: hook(None, bucket)
    return found


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


def bytes_sent(options: Namespace) -> Iterator[Found]:
    """Count bytes among each number of ranks, and among eight."""
    for size in [*options.world_sizes, 8]:
        sent = run_ranks(count_bytes, size, timeout=300)[0]
        print(f"\n{size} ranks: MiB sent by rank 0 as counted by the kernel, and share of fp32")
        for name, count in sent.items():
            print(f"  {name:<38}{count / 2**20:8.2f}{count / sent[PLAIN]:8.3f}")
        yield ("bytes", size), sent


SHOWN = {
    PLAIN: "PyTorch's allreduce_hook",
    HALF: "ours: 16 bits",
    QUANTIZED: "ours: 8 bits",
    "ours: 4 bits, no error feedback": "ours: 4 bits, no feedback",
    "ours: 4 bits": "ours: 4 bits, feedback",
}
"""What is drawn, with its label."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times of the hooks that are compared with each other, between two ranks."""
    tables = {"ranks, loopback": results.get("loopback", {})}
    for rate, by_size in results.get("hosts", {}).items():
        tables[f"emulated hosts, {rate.replace('gbit', ' Gbit/s')}"] = by_size
    panels = {
        f"2 {where}": bars_of(
            {label: table["2"][name] for name, label in SHOWN.items() if name in table["2"]}
        )
        for where, table in tables.items()
        if "2" in table
    }
    draw_bars(panels, "ms", path, title="Averaging a bucket of 25 MiB")


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=21)
    benchmark.parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    measured = (PLAIN, HALF, *STATES, *AFFINE)
    benchmark.run(
        {
            "loopback": lambda o: times_of_hooks(hooks, "loopback", [None], o.world_sizes, o.repeats),
            "bytes": bytes_sent,
            "memory": lambda o: memory_of_hooks(hooks, measured, o.world_sizes),
            "hosts": lambda o: times_of_hooks(hooks, "hosts", RATES, o.world_sizes, o.repeats),
        },
        facts={"bucket_mib": ELEMENTS * 4 / 2**20},
        draw=draw,
    )
