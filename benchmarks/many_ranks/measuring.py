"""The measurements for the cost model: kernels alone, and averages of one bucket among real ranks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hook_harness import run_on_hosts

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import QuantizedAllreduceState, kernels, quantized_allreduce_hook
from ddp_quant_hooks.chunks import Span, shards
from ddp_quant_hooks.kernels import Layout
from dist_utils import start_messages
from dist_utils.testing import grad_bucket, run_ranks

__all__ = ["DIRECT", "HOOKS", "RING", "be_a_rank", "measure_case", "measure_kernels", "measure_starting"]

RING, DIRECT = "fp32 ring", "8 bits direct"
HOOKS = (RING, DIRECT)

_SHORT = 1 << 22
"""Buckets of up to this many bytes take little time, and are measured more often."""

Times = dict[str, dict[str, list[float]]]
"""Seconds and processor seconds of every repeat, by hook and size."""


def measure_case(ranks: int, gbit: float | None, sizes: Sequence[int], repeats: int, script: str) -> Any:
    """Measure both hooks among ranks on loopback, or on emulated hosts with one rank each.

    Args:
        ranks: Number of ranks.
        gbit: The rate of the hosts' links; ``None`` for loopback.
        sizes: The buckets' sizes in bytes.
        repeats: Repeats of each.
        script: A script that calls :func:`be_a_rank` when run as ``script rank FOLDER``.

    Returns:
        By "hook, bytes": the slowest rank's seconds, as the minimum, which other programs have disturbed
        least, and as quartiles and median; and the minimum of the ranks' mean processor seconds.
    """
    if gbit is None:
        found: list[Times] = run_ranks(measure_hooks, ranks, sizes, repeats, timeout=600)
    else:
        options = [f"--repeats={repeats}", "--sizes", *map(str, sizes)]
        found = run_on_hosts([script, "rank"], options, ranks, rate=f"{gbit:g}gbit")  # type: ignore[assignment]
    return {name: _summary([rank[name] for rank in found]) for name in found[0]}


def _summary(ranks: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    slowest = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)]
    cpu = [statistics.mean(times) for times in zip(*(rank["cpu"] for rank in ranks), strict=True)]
    low, median, high = statistics.quantiles(slowest, n=4, method="inclusive")
    return {"fastest": min(slowest), "quartiles": [low, median, high], "cpu": min(cpu)}


def measure_hooks(rank: int, sizes: Sequence[int], repeats: int) -> Times:
    """Return this rank's times of both hooks on buckets of every size, in turns."""
    torch.set_num_threads(1)
    state = QuantizedAllreduceState(min_bytes=0)
    hooks: dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]] = {
        RING: lambda bucket: allreduce_hook(None, bucket),
        DIRECT: lambda bucket: quantized_allreduce_hook(state, bucket),
    }
    times: Times = {}
    for size in sizes:
        bucket = grad_bucket([torch.zeros(size // 4)])
        buffer = bucket.buffer()
        source = torch.randn(buffer.numel(), generator=torch.Generator().manual_seed(rank))
        for repeat in range(-2, repeats * (1 if size > _SHORT else 4)):
            for name in HOOKS if repeat % 2 else reversed(HOOKS):
                bucket.set_buffer(buffer.copy_(source))
                dist.barrier()
                began, cpu = time.perf_counter(), time.process_time()
                hooks[name](bucket).wait()
                took, worked = time.perf_counter() - began, time.process_time() - cpu
                dist.barrier()
                if repeat >= 0:
                    entry = times.setdefault(f"{name}, {size}", {"seconds": [], "cpu": []})
                    entry["seconds"].append(took)
                    entry["cpu"].append(worked)
    return times


def be_a_rank(folder: Path, sizes: Sequence[int], repeats: int) -> None:
    """Run one rank on an emulated host."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(measure_hooks(rank, sizes, repeats)))
    dist.barrier()
    dist.destroy_process_group()


def measure_starting(ranks: int = 4, repeats: int = 200) -> dict[str, float]:
    """Return the processor time of short messages, and the share of the thread that starts them."""
    found = run_ranks(_start_short_messages, ranks, repeats, timeout=120)
    return {
        "cpu_per_message": statistics.median(cpu for cpu, _ in found),
        "starting": statistics.median(thread / cpu for cpu, thread in found),
    }


def _start_short_messages(rank: int, repeats: int) -> tuple[float, float]:
    torch.set_num_threads(1)
    group = dist.group.WORLD
    assert group is not None
    peers = [peer for peer in range(group.size()) if peer != rank]
    tensors = {peer: (torch.zeros(1), torch.zeros(1)) for peer in peers}
    cpu = thread = 0.0
    for repeat in range(-20, repeats):
        began_cpu, began_thread = time.process_time(), time.thread_time()
        works = start_messages(
            group,
            receives=[(peer, tensors[peer][0]) for peer in peers],
            sends=[(peer, tensors[peer][1]) for peer in peers],
        )
        for work in works:
            work.wait()
        if repeat >= 0:
            cpu += time.process_time() - began_cpu
            thread += time.thread_time() - began_thread
    count = repeats * len(peers)
    return cpu / count, thread / count


def measure_kernels(repeats: int = 15) -> list[dict[str, Any]]:
    """Return the seconds of the kernels' calls on this processor, with one thread, as points for a fit.

    Values that a kernel reads count once per message, as in :class:`~many_ranks.recording.Compute`.
    """
    torch.set_num_threads(1)
    points = []
    layout = Layout("int8", 128)
    for values, messages in ((1 << 20, 1), (1 << 20, 16), (1 << 17, 1), (1 << 17, 16), (1 << 17, 256)):
        source, result = torch.randn(values), torch.empty(values)
        spans = shards(Span(0, values), messages, layout.block_size)
        parts = [_message(layout, len(span)) for span in spans]
        encode = partial(kernels.encode_shards, source, parts, layout)
        decode = partial(kernels.decode_shards, parts, layout, result)
        points += [
            _point("encode", values, messages, repeats, encode),
            _point("decode", values, messages, repeats, decode),
        ]
        length = values // messages
        same = [_encoded(layout, length) for _ in range(messages)]
        out = _message(layout, length)
        average = partial(kernels.reduce, same, layout, length, out, layout)
        points.append(_point("reduce", length * messages, messages, repeats, average))
    for values in (1 << 12, 1 << 20):
        one, other = torch.randn(values), torch.randn(values)
        points.append(_point("elementwise", values, 1, repeats, partial(one.add_, other)))
    return points


def _point(
    kernel: str, values: int, messages: int, repeats: int, call: Callable[[], object]
) -> dict[str, Any]:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return {"kernel": kernel, "values": values, "messages": messages, "seconds": min(times)}


def _message(layout: Layout, values: int) -> torch.Tensor:
    return torch.empty(layout.message_bytes(values), dtype=torch.uint8)


def _encoded(layout: Layout, values: int) -> torch.Tensor:
    message = _message(layout, values)
    kernels.encode(torch.randn(values), message, layout)
    return message
