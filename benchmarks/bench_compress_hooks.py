"""ddp-compress-hooks against PyTorch's hooks of the same names: time, memory, error; loopback and slow links.

    python benchmarks/bench_compress_hooks.py              # everything, a few minutes; hosts need root
    python benchmarks/bench_compress_hooks.py time --world-sizes 2 --repeats 5

One 25 MiB bucket of fp32 on Gloo. Writes results/compress_hooks.json beside this file.
Times are of the slowest rank, from the hook's call until the mean is in the bucket; every repeat runs all
hooks, in turns forwards and backwards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated_hosts import EmulationUnavailableError
from hook_harness import ELEMENTS, be_a_rank, measure_memory, measure_time, real_bucket, time_on_hosts
from machine import describe_machine
from timings import slowest
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

RESULTS = Path(__file__).parent / "results"

# name: (PyTorch's hook, ours, our options). The last two have no counterpart in PyTorch and stand
# name: (PyTorch's hook, ours, our options). The last two have no counterpart in PyTorch and are compared
# with its hook of the same dtype.
PAIRS: dict[str, tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]] = {
    "allreduce_hook": (pytorch.allreduce_hook, allreduce_hook, {}),
    "fp16_compress_hook": (pytorch.fp16_compress_hook, fp16_compress_hook, {}),
    "bf16_compress_hook": (pytorch.bf16_compress_hook, bf16_compress_hook, {}),
    "fp16_compress_wrapper": (
        pytorch.fp16_compress_wrapper(pytorch.allreduce_hook),
        fp16_compress_wrapper(allreduce_hook),
        {},
    ),
    "bf16_compress_wrapper": (
        pytorch.bf16_compress_wrapper(pytorch.allreduce_hook),
        bf16_compress_wrapper(allreduce_hook),
        {},
    ),
    "fp16, sum in fp32": (pytorch.fp16_compress_hook, fp16_compress_hook, {"accumulate": "fp32"}),
    "bf16, sum in fp32": (pytorch.bf16_compress_hook, bf16_compress_hook, {"accumulate": "fp32"}),
}
ERROR_SCALES = [1e-7, 1e-3, 1.0, 1e4]


def sides() -> dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]]:
    """Return every hook to measure, as a function of a bucket."""
    found: dict[str, Callable[[Any], torch.futures.Future[torch.Tensor]]] = {}
    for name, (theirs, ours, options) in PAIRS.items():
        state = CompressState(**options) if options else None
        if not options:  # otherwise it is there already
            found[f"pytorch/{name}"] = lambda bucket, hook=theirs: hook(None, bucket)
        found[f"ours/{name}"] = lambda bucket, hook=ours, state=state: hook(state, bucket)
    return found


def measure_error(rank: int) -> dict[str, list[float]]:
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


def report(results: dict[str, Any]) -> None:
    """Print both sides and their ratio."""
    for kind in ("loopback", "hosts"):
        for world_size, times in results.get(kind, {}).items():
            unit = "loopback ranks" if kind == "loopback" else "hosts with 1 Gbit/s links"
            print(f"\n{world_size} {unit}: ms, median [quartiles]")
            plain = times["ours/allreduce_hook"]["median_ms"]
            for name, (_, _, options) in PAIRS.items():
                theirs = times[f"pytorch/{_counterpart(name)}" if options else f"pytorch/{name}"]
                ours = times[f"ours/{name}"]
                print(
                    f"  {name:<24}{_ms(ours):<24}pytorch {_ms(theirs):<24}"
                    f"ours/pytorch {ours['median_ms'] / theirs['median_ms']:.2f}   "
                    f"faster than allreduce_hook {plain / ours['median_ms']:.2f}x"
                )
    for world_size, memory in results.get("memory_mib", {}).items():
        print(f"\n{world_size} ranks: extra peak memory of the worst rank, MiB")
        for name, mib in memory.items():
            print(f"  {name:<32}{mib:6.1f}")
    for world_size, errors in results.get("relative_error", {}).items():
        print(f"\n{world_size} ranks: relative error for gradients of scale {ERROR_SCALES}")
        for name, values in errors.items():
            print(f"  {name:<32}" + "".join(f"{value:12.4e}" for value in values))


def _ms(times: dict[str, Any]) -> str:
    low, high = times["quartiles_ms"]
    return f"{times['median_ms']:.1f} [{low:.1f}, {high:.1f}]"


def _counterpart(name: str) -> str:
    return f"{name.split(',', maxsplit=1)[0]}_compress_hook"


def measure(wants: set[str], options: argparse.Namespace) -> dict[str, Any]:
    """Measure the wanted parts."""
    results: dict[str, Any] = {
        **describe_machine(),
        "bucket_mib": ELEMENTS * 4 / 2**20,
        "repeats": options.repeats,
    }
    sizes = options.world_sizes
    if "time" in wants:
        results["loopback"] = {
            size: slowest(run_ranks(measure_time, size, sides, options.repeats, timeout=900))
            for size in sizes
        }
    if "hosts" in wants:
        try:
            results["hosts"] = {size: time_on_hosts(__file__, size, options.repeats) for size in sizes}
        except EmulationUnavailableError as error:
            print(f"SKIPPED the emulated hosts: {error}", file=sys.stderr)
            if options.part == "hosts":
                raise SystemExit(1) from None
    if "memory" in wants:
        names = [f"{side}/{name}" for name in PAIRS for side in ("pytorch", "ours")]
        results["memory_mib"] = {
            size: {
                name: round(max(run_ranks(measure_memory, size, sides, name, timeout=120)), 1)
                for name in names
                if name.startswith("ours") or not PAIRS[name.removeprefix("pytorch/")][2]
            }
            for size in sizes
        }
    if "error" in wants:
        results["error_scales"] = ERROR_SCALES
        results["relative_error"] = {size: run_ranks(measure_error, size, timeout=300)[0] for size in sizes}
    return results


def main() -> None:
    """Run the chosen parts, and print and store their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["time", "memory", "error", "hosts"]
    parser.add_argument("part", nargs="?", choices=["all", *parts, "rank"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4])
    options = parser.parse_args()
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, for the quartiles")
    if options.part == "rank":
        be_a_rank(options.folder, sides, options.repeats)
        return
    wants = {options.part} if options.part != "all" else set(parts)
    results = measure(wants, options)
    report(results)
    if options.part == "all":
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "compress_hooks.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"\nwritten: {RESULTS / 'compress_hooks.json'}")


if __name__ == "__main__":
    main()
