"""The hook of low rank against PyTorch's powerSGD_hook on one bucket: time, the processor's time, memory.

    python benchmarks/bench_low_rank_hooks.py              # two minutes

Two ranks on loopback, with all gradients of the transformer of 7 million parameters in one bucket. Times are
from the hook's call until the mean is in the bucket: of the slowest rank, and what the process of the busiest
one computes meanwhile. Memory in bytes a parameter, of the rank with more: of the tensors that are kept from
step to step, and by how much a step's peak is above what the process takes before the first one.

Writes results/low_rank_hooks.json.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import memory
import torch
from bench_quant_convergence import tensor_bytes
from harness import Benchmark, Found, Seconds, in_turns, print_times, slowest
from rank_processes import on_ranks
from tasks import MODELS
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from ddp_quant_hooks import LowRankState, low_rank_hook
from dist_utils.testing import grad_bucket

APPROXIMATION_RANKS = (1, 4, 8, 16)
WARM_UP = 4
"""Uncounted first calls: two of PyTorch's send full gradients."""

Side = Callable[[Any], "torch.futures.Future[torch.Tensor]"]


def sides() -> dict[str, Side]:
    """Return the hook of each library and rank, with a state of its own."""
    found: dict[str, Side] = {}
    for rank in APPROXIMATION_RANKS:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        found[f"pytorch, rank {rank}"] = partial(powerSGD_hook.powerSGD_hook, state)
        found[f"ours, rank {rank}"] = partial(low_rank_hook, LowRankState(rank=rank, warm_up_steps=0))
    return found


def make_bucket(rank: int) -> tuple[Any, torch.Tensor]:
    """Return a bucket with all gradients of the model, and values for it."""
    model = MODELS["7M"].task().model()
    bucket = grad_bucket([torch.zeros_like(parameter) for parameter in model.parameters()])
    return bucket, torch.randn(bucket.buffer().numel(), generator=torch.Generator().manual_seed(rank))


def measure_times(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every call of every side, and those of the processor."""
    memory.keep_freed_memory()
    bucket, source = make_bucket(rank)

    def average(name: str, hook: Side) -> Seconds:
        began = time.process_time()
        hook(bucket).wait()
        return Seconds({f"{name}, processor": time.process_time() - began})

    calls = {name: partial(average, name, hook) for name, hook in sides().items()}
    return in_turns(calls, repeats, warm_up=WARM_UP, prepare=lambda _: bucket.buffer().copy_(source))


def measure_memory(rank: int, name: str) -> tuple[float, float]:
    """Return what a side keeps, and its peak, in bytes a parameter."""
    memory.return_freed_memory()
    bucket, source = make_bucket(rank)
    hook, count = sides()[name], source.numel()
    tensors, before = tensor_bytes(), memory.begin_peak()
    for _ in range(WARM_UP):
        bucket.buffer().copy_(source)
        hook(bucket).wait()
    memory.forget_peak()
    hook(bucket).wait()
    return (tensor_bytes() - tensors) / count, (memory.peak() - before) * 2**20 / count


def all_times(options: Namespace) -> Iterator[Found]:
    """Measure all sides in turns."""
    ranks = on_ranks(measure_times, 2, options.repeats, rate=None, timeout=300)
    times = slowest(ranks)
    print_times("two ranks, loopback, 7M", times, lambda name: name.replace("ours", "pytorch"))
    yield ("times",), times


def all_memory(options: Namespace) -> Iterator[Found]:  # noqa: ARG001
    """Measure each side in new processes."""
    for name in [f"{side}, rank {rank}" for rank in APPROXIMATION_RANKS for side in ("pytorch", "ours")]:
        kept, peak = map(max, zip(*on_ranks(measure_memory, 2, name, rate=None, timeout=120), strict=True))
        print(f"{name}: {kept:.2f} bytes a parameter are kept, {peak:.2f} at the peak", flush=True)
        yield ("bytes_a_parameter", name), {"kept": round(kept, 2), "peak": round(peak, 2)}


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=21)
    benchmark.run({"times": all_times, "memory": all_memory})
