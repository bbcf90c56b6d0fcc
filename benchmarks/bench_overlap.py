"""Overlapped optimizer steps against the ordinary loop and PyTorch's overlap: time and launch cost.

    python benchmarks/bench_overlap.py             # everything, half an hour
    python benchmarks/bench_overlap.py loopback --models 10MB --repeats 20
    python benchmarks/bench_overlap.py hosts | compressed | launch

Two ranks on Gloo, AdamW, and a stack of square linear layers with biases, or a small transformer: 1.4 million
parameters in 75 tensors. Writes results/overlap.json and .png
beside this file; running one part replaces only its own numbers. Times are of the slowest rank, for
zero_grad, forward, backward and step; every repeat runs all sides, in turns forwards and backwards. The
allocator keeps freed memory, because new pages cost more than the compared effects, now on one side, now on
another.

One side is the ordinary loop with PyTorch's allreduce_hook, which averages like DDP without a hook: it shows
the cost of any communication hook in Python, before anything is overlapped.

The part "compressed" has gradients in 8 bits on both sides, with 1 Gbit/s between two hosts.

With T0 the ordinary loop's time, T ours, O the optimizer's own step and n the number of buckets, all but
the last bucket's step can be hidden: the efficiency is (T0 - T) / (O - O / n).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bar_charts import bars_of, draw_bars
from emulated_hosts import EmulationUnavailableError
from hook_harness import run_on_hosts
from machine import describe_machine
from models import Transformer
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps
from ddp_optim_overlap.passes.bucket import gradients_replaced
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results"
ORDINARY, HOOKED, PYTORCH, OURS, RELEASED = (
    "ordinary loop",
    "ordinary loop, hook",
    "PyTorch's overlap",
    "ours: BUCKET",
    "ours: release_gradients",
)
QUANTIZED, BOTH = "8 bits", "8 bits, ours: BUCKET"
SIDES = {
    "loopback": (ORDINARY, HOOKED, PYTORCH, OURS, RELEASED),
    "hosts": (ORDINARY, HOOKED, PYTORCH, OURS, RELEASED),
    "compressed": (ORDINARY, QUANTIZED, BOTH),
}
STEP = "optimizer.step() alone"
BUCKETS = {"10MB": 10, "60MB": 15, "transformer": 10}
LAYERS = {"10MB": (256, 40), "60MB": (512, 60)}
"""The width and the number of layers of each stack."""
CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "loopback": {"10MB": (8, 64), "60MB": (8, 64), "transformer": (8,)},
    "hosts": {"10MB": (8,), "60MB": (8,)},
    "compressed": {"10MB": (8,), "60MB": (8,), "transformer": (8,)},
}
"""The rows of a batch, per model."""
KINDS = ("fused", "foreach")
WORDS, WORDS_IN_ROW = 500, 32
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # constants in glibc's malloc.h


def make_net(model: str) -> nn.Module:
    """Return a stack of linear layers, or a transformer."""
    torch.manual_seed(0)
    if model not in LAYERS:
        return Transformer(WORDS, 128, heads=4, layers=6)
    width, count = LAYERS[model]
    layers = [nn.Linear(width, width) for _ in range(count)]
    for layer in layers:
        # This keeps the size of gradients. Where they vanish, their squares are denormal numbers, which make
        # a step four times as long.
        nn.init.xavier_uniform_(layer.weight)
    return nn.Sequential(*layers)


def make_batch(model: str, rows: int, seed: int) -> torch.Tensor:
    """Return a training batch for the model."""
    generator = torch.Generator().manual_seed(seed)
    if model in LAYERS:
        return torch.randn(rows, LAYERS[model][0], generator=generator)
    return torch.randint(0, WORDS, (rows, WORDS_IN_ROW), generator=generator)


def make_ddp(net: nn.Module, buckets: int, **options: Any) -> DistributedDataParallel:
    """Return a model with this many buckets, or one more, from the second step on."""
    size = sum(parameter.nbytes for parameter in net.parameters())
    return DistributedDataParallel(net, bucket_cap_mb=size / buckets / 2**20, **options)


def make_sides(
    names: Sequence[str], model: str, kind: str
) -> dict[str, tuple[DistributedDataParallel, Any, Any]]:
    """Return each side's model, the optimizer that the loop steps, and the handle of an overlap, if any."""
    made: dict[str, tuple[DistributedDataParallel, Any, Any]] = {}
    for name in names:
        ddp = make_ddp(make_net(model), BUCKETS[model])
        if name == HOOKED:
            ddp.register_comm_hook(None, allreduce_hook)
        if name == QUANTIZED:
            ddp.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)
        if name == PYTORCH:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its functional optimizers are deprecated
                ddp._register_fused_optim(torch.optim.AdamW, 1e-4, **{kind: True})  # noqa: SLF001 - the other side
            made[name] = ddp, None, None
            continue
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, **{kind: True})  # type: ignore[arg-type]
        handle = None
        if name in (OURS, RELEASED):
            handle = overlap_optimizer(ddp, optimizer, release_gradients=name == RELEASED)
        if name == BOTH:
            state = QuantizedAllreduceState()
            handle = overlap_optimizer(ddp, optimizer, comm_hook=quantized_allreduce_hook, comm_state=state)
        made[name] = ddp, optimizer, handle
    return made


def measure(
    rank: int, names: Sequence[str], model: str, kind: str, batch: int, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of every step of every side, the optimizer's own share, and the buckets."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 2**25)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    everyone = make_sides(names, model, kind)
    x = make_batch(model, batch, seed=rank)
    seconds: dict[str, list[float]] = {name: [] for name in (*everyone, STEP)}
    for repeat in range(-3, repeats):  # DDP rebuilds its buckets, and memory is allocated
        for name in list(everyone) if repeat % 2 else reversed(list(everyone)):
            ddp, optimizer, _ = everyone[name]
            dist.barrier()
            began = time.perf_counter()
            ddp.zero_grad()
            ddp(x).square().mean().backward()
            averaged = time.perf_counter()
            if optimizer is not None:
                optimizer.step()
            ended = time.perf_counter()
            if repeat >= 0:
                seconds[name].append(ended - began)
                if name == ORDINARY:
                    seconds[STEP].append(ended - averaged)
    (seconds["buckets"], *_) = [
        [handle.wait().buckets] for _, _, handle in everyone.values() if handle is not None
    ]
    return seconds


def summarize(ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return medians and quartiles of the slowest rank in ms, and the efficiency."""
    (buckets,) = ranks[0]["buckets"]
    times = {
        name: [1e3 * max(repeat) for repeat in zip(*(rank[name] for rank in ranks), strict=True)]
        for name in ranks[0]
        if name != "buckets"
    }
    load = [round(value, 1) for value in os.getloadavg()]
    summary: dict[str, Any] = {
        "buckets": int(buckets),
        "repeats": len(times[STEP]),
        "load_1_5_15_min": load,
        "sides": {},
    }
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4)
        summary["sides"][name] = {
            "median_ms": round(median, 2),
            "quartiles_ms": [round(low, 2), round(high, 2)],
        }
    step = statistics.median(times[STEP])
    hideable = step - step / buckets
    for name, own in times.items():
        if name in (ORDINARY, STEP):
            continue
        # Differences within one turn: whatever slows the machine for a while slows both.
        saved = [plain - other for plain, other in zip(times[ORDINARY], own, strict=True)]
        ratios = {
            base: statistics.median(other / one for one, other in zip(times[base], own, strict=True))
            for base in (ORDINARY, HOOKED, PYTORCH, QUANTIZED)
            if base in times
        }
        low, median, high = statistics.quantiles(saved, n=4)
        summary["sides"][name] |= {
            "saved_ms": round(median, 2),
            "saved_quartiles_ms": [round(low, 2), round(high, 2)],
            "share_of": {base: round(ratio, 3) for base, ratio in ratios.items()},
        }
        if QUANTIZED not in times:  # otherwise most of the saved time is not a step
            summary["sides"][name]["efficiency"] = round(median / hideable, 3)
    return summary


def measure_launch(rank: int, repeats: int = 200, count: int = 200, buckets: int = 10) -> dict[str, Any]:
    """Return the ms of one step of small parameters, as a whole, in buckets and one by one."""
    del rank
    torch.set_num_threads(1)
    seen: dict[str, Any] = {"parameters": count, "elements": 64, "buckets": buckets}
    for kind in KINDS:
        ways = launch_ways(kind, count, count // buckets)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(-20, repeats):
            for name, way in ways.items():
                began = time.perf_counter()
                way()
                if repeat >= 0:
                    times[name].append(1e3 * (time.perf_counter() - began))
        one = statistics.median(times["one step"])
        seen[kind] = {
            name: {
                "median_ms": round(statistics.median(values), 3),
                "quartiles_ms": [round(value, 3) for value in statistics.quantiles(values, n=4)[::2]],
                "of_one_step": round(statistics.median(values) / one, 2),
            }
            for name, values in times.items()
        }
    return seen


def launch_ways(kind: str, count: int, size: int) -> dict[str, Callable[[], None]]:
    """Return the ways to step ``count`` parameters of 64 values, ``size`` of them per bucket."""
    parameters = [nn.Parameter(torch.randn(64)) for _ in range(count)]
    gradients = [torch.randn(64) for _ in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    whole = torch.optim.AdamW(parameters, lr=1e-4, **{kind: True})  # type: ignore[arg-type]
    single = [torch.optim.AdamW([one], lr=1e-4, **{kind: True}) for one in parameters]  # type: ignore[arg-type]
    partial = PartialSteps([whole])
    averaged = [gradient.clone() for gradient in gradients]

    def in_buckets() -> None:
        partial.begin()
        for begin in range(0, count, size):
            part = parameters[begin : begin + size]
            with torch.no_grad(), gradients_replaced(part, averaged[begin : begin + size]):
                partial.step(part)
        partial.finish()

    def one_by_one() -> None:
        for optimizer in single:
            optimizer.step()

    def one_step() -> None:
        whole.step()

    return {
        "one step": one_step,
        "ours: steps of buckets": in_buckets,
        "one optimizer per parameter": one_by_one,
    }


def be_a_rank(folder: Path, options: argparse.Namespace) -> None:
    """Run one rank on an emulated host."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (model,), (kind,), (batch,), (sides,) = options.models, options.kinds, options.batches, options.sides
    seen = measure(rank, SIDES[sides], model, kind, batch, options.repeats)
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()


def time_everything(where: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the summaries of every model and kind of step, on loopback or on two emulated hosts."""
    found = {}
    cases = [
        (model, kind, batch)
        for model, batches in CASES[where].items()
        for kind in options.kinds
        for batch in options.batches or batches
        if model in options.models
    ]
    for model, kind, batch in cases:
        if where == "loopback":
            ranks = run_ranks(measure, 2, SIDES[where], model, kind, batch, options.repeats, timeout=900)
        else:
            arguments = [f"--models={model}", f"--kinds={kind}", f"--batches={batch}", f"--sides={where}"]
            arguments += [f"--repeats={options.repeats}"]
            ranks = run_on_hosts([__file__, "rank"], arguments, 2, rate="1gbit")
        case = f"{model}, {kind}, batch {batch}"
        found[case] = summary = summarize(ranks)
        print(f"{where}, {case}, {summary['buckets']} buckets, load {summary['load_1_5_15_min']}")
        for name, side in summary["sides"].items():
            line = f"  {name:<24}{side['median_ms']:>9} ms {side['quartiles_ms']}"
            if "saved_ms" in side:
                shares = ", ".join(f"{share} of {base}" for base, share in side["share_of"].items())
                line += f"{side['saved_ms']:>8} saved, {shares}"
                line += f", efficiency {side['efficiency']}" if "efficiency" in side else ""
            print(line, flush=True)
    return found


def draw(results: dict[str, Any]) -> None:
    """Draw the steps of the larger model with the longer step, where there are any."""
    panels = {}
    for part, where in (("hosts", "two emulated hosts, 1 Gbit/s"), ("loopback", "two ranks, loopback")):
        if found := results.get(part, {}).get("cases", {}).get("60MB, foreach, batch 8"):
            bars = bars_of(found["sides"])
            panels[where] = {name: bars[name] for name in bars if name != STEP}
    if panels:
        title = "A training step with AdamW (foreach), 60 MB of parameters"
        draw_bars(panels, "ms", RESULTS / "overlap.png", title=title)


def main() -> None:
    """Run the requested parts, and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("all", *CASES, "launch", "plot", "rank")
    parser.add_argument("part", nargs="?", default="all", choices=parts)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--models", nargs="+", default=list(BUCKETS), choices=list(BUCKETS))
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument(
        "--batches", type=int, nargs="+", help="rows; default: 8, and for stacks on loopback also 64"
    )
    parser.add_argument("--sides", nargs="+", default=["hosts"], choices=list(CASES), help="used by ranks")
    parser.add_argument("--repeats", type=int, default=41)
    options = parser.parse_args()
    if options.part == "rank":
        be_a_rank(options.folder, options)
        return
    path = RESULTS / "overlap.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    for part in CASES if options.part == "all" else [options.part]:
        if part in CASES:
            try:
                found = time_everything(part, options)
            except EmulationUnavailableError as error:
                print(f"no emulated hosts: {error}", file=sys.stderr)
                continue
            earlier = results.get(part, {}).get("cases", {})
            results[part] = {**describe_machine(), "cases": {**earlier, **found}}
    if options.part in ("all", "launch"):
        (found,) = run_ranks(measure_launch, 1)
        results["launch"] = {**describe_machine(), **found}
        print(json.dumps(found, indent=1))
    path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results)


if __name__ == "__main__":
    main()
