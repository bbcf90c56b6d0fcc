"""ddp-compress-hooks against PyTorch's hooks of the same names: time, memory, error; loopback and slow links.

    python benchmarks/bench_compress_hooks.py              # everything, a few minutes; hosts need root
    python benchmarks/bench_compress_hooks.py loopback --world-sizes 2 --repeats 5

One 25 MiB bucket of fp32 on Gloo. Times are of the slowest rank, from the hook's call until the mean is in
the bucket. Writes results/compress_hooks.json.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from buckets import ELEMENTS, memory_of_hooks, real_bucket, times_of_hooks
from harness import Benchmark, Found
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as pytorch

from ddp_compress_hooks import (
    CompressState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
)
from dist_utils.testing import run_ranks

# name: (PyTorch's hook, ours)
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "allreduce_hook": (pytorch.allreduce_hook, allreduce_hook),
    "fp16_compress_hook": (pytorch.fp16_compress_hook, fp16_compress_hook),
    "bf16_compress_hook": (pytorch.bf16_compress_hook, bf16_compress_hook),
    "fp16_compress_wrapper": (
        pytorch.fp16_compress_wrapper(pytorch.allreduce_hook),
        fp16_compress_wrapper(allreduce_hook),
    ),
    "bf16_compress_wrapper": (
        pytorch.bf16_compress_wrapper(pytorch.allreduce_hook),
        bf16_compress_wrapper(allreduce_hook),
    ),
}
# PyTorch has no sums in fp32.
OURS_ALONE = {"fp16, sum in fp32": fp16_compress_hook, "bf16, sum in fp32": bf16_compress_hook}
ERROR_SCALES = [1e-7, 1e-3, 1.0, 1e4]


def sides() -> dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]]:
    """Return every hook to measure, as a function of a bucket."""
    found: dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]] = {}
    for name, pair in PAIRS.items():
        for side, hook in zip(("pytorch", "ours"), pair, strict=True):
            found[f"{side}/{name}"] = lambda bucket, hook=hook: hook(None, bucket)
    for name, hook in OURS_ALONE.items():
        state = CompressState(accumulate="fp32")
        found[f"ours/{name}"] = lambda bucket, hook=hook, state=state: hook(state, bucket)
    return found


def measure_errors(rank: int) -> dict[str, list[float]]:
    """Return every hook's relative error against the exact mean, for normal gradients of several scales."""
    bucket, hooks = real_bucket(), sides()
    buffer = bucket.buffer()
    errors: dict[str, list[float]] = {name: [] for name in hooks}
    for scale in ERROR_SCALES:
        source = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank)) * scale
        exact = source.double()
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        for name, hook in hooks.items():
            bucket.set_buffer(buffer.copy_(source))
            result = hook(bucket).wait().double()
            errors[name].append(float((result - exact).norm() / exact.norm()))
    return errors


def relative_errors(options: Namespace) -> Iterator[Found]:
    """Measure errors among each number of ranks."""
    for size in options.world_sizes:
        errors = run_ranks(measure_errors, size, timeout=300)[0]
        print(f"\n{size} ranks: relative error for gradients of scale {ERROR_SCALES}")
        for name, values in errors.items():
            print(f"  {name:<32}" + "".join(f"{value:12.4e}" for value in values))
        yield ("relative_error", size), errors


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=21)
    benchmark.parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    benchmark.run(
        {
            "loopback": lambda o: times_of_hooks(sides, "loopback", [None], o.world_sizes, o.repeats),
            "memory": lambda o: memory_of_hooks(sides, list(sides()), o.world_sizes),
            "error": relative_errors,
            "hosts": lambda o: times_of_hooks(sides, "hosts", ["1gbit"], o.world_sizes, o.repeats),
        },
        facts={"bucket_mib": ELEMENTS * 4 / 2**20, "error_scales": ERROR_SCALES},
    )
