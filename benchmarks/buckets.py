"""Time and memory of communication hooks on one bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import memory
import torch
import torch.distributed as dist
from harness import Found, in_turns, print_times, slowest
from rank_processes import on_ranks

from dist_utils.testing import grad_bucket, run_ranks

ELEMENTS = 25 * 2**20 // 4

Hooks: TypeAlias = Mapping[str, Callable[[Any], "torch.futures.Future[torch.Tensor]"]]
"""Hooks by name, as functions of a bucket."""
MakeHooks: TypeAlias = Callable[[], Hooks]
"""Makes the hooks where they run; a module-level function, so that it can be pickled."""


def real_bucket(values: int = ELEMENTS) -> Any:
    """Return a GradBucket that DDP passes to its hook."""
    return grad_bucket([torch.zeros(values)])


def time_hooks(
    rank: int, make_hooks: MakeHooks, repeats: int, values: int = ELEMENTS
) -> dict[str, list[float]]:
    """Return the seconds of every run of every hook, until the mean is in the bucket."""
    bucket, hooks = real_bucket(values), make_hooks()
    buffer = bucket.buffer()
    source = torch.randn(values, generator=torch.Generator().manual_seed(rank))

    def refill(_: str) -> None:
        bucket.set_buffer(buffer.copy_(source))  # PyTorch's wrappers leave a 16-bit buffer behind

    def average(name: str) -> None:
        result = hooks[name](bucket).wait()
        if result.data_ptr() != buffer.data_ptr():
            buffer.copy_(result)  # as DDP does: PyTorch's wrappers leave the cast back to it

    sides = {name: lambda name=name: average(name) for name in hooks}
    return in_turns(sides, repeats, warm_up=1, prepare=refill)


def times_of_hooks(
    make_hooks: MakeHooks, part: str, rates: Sequence[str | None], sizes: Sequence[int], repeats: int
) -> Iterator[Found]:
    """Measure, print and yield the times for every rate of links and every number of ranks.

    Args:
        make_hooks: Makes the hooks.
        part: The key in the result file; with several rates, they are the next one.
        rates: Rates of the emulated hosts' links; ``None``: loopback.
        sizes: Numbers of ranks.
        repeats: How often each hook runs.
    """
    for rate in rates:
        for size in sizes:
            times = slowest(on_ranks(time_hooks, size, make_hooks, repeats, rate=rate, timeout=900))
            title = f"{size} ranks, loopback" if rate is None else f"{size} hosts, {rate}"
            print_times(title, times, next(iter(times)))
            yield (part, *([rate] if len(rates) > 1 else []), size), times


def measure_memory(rank: int, make_hooks: MakeHooks, name: str) -> float:
    """Return by how many MiB one run of a hook raises the peak memory of a fresh process."""
    bucket, hook = real_bucket(), make_hooks()[name]
    large = bucket.buffer()
    large.normal_(generator=torch.Generator().manual_seed(rank))
    bucket.set_buffer(torch.ones(1000))  # loads code, starts threads
    hook(bucket).wait()
    bucket.set_buffer(large)
    dist.barrier()
    before = memory.begin_peak()
    hook(bucket).wait()
    return memory.peak() - before


def memory_of_hooks(make_hooks: MakeHooks, names: Sequence[str], sizes: Sequence[int]) -> Iterator[Found]:
    """Measure, print and yield the extra peak memory of the worst rank in MiB, for every number of ranks."""
    for size in sizes:
        print(f"\n{size} ranks: extra peak memory of the worst rank, MiB")
        found = {}
        for name in names:
            found[name] = round(max(run_ranks(measure_memory, size, make_hooks, name, timeout=120)), 1)
            print(f"  {name:<48}{found[name]:8.1f}", flush=True)
        yield ("memory_mib", size), found
