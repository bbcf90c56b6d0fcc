"""Overlapped optimizer steps against the ordinary loop and PyTorch's overlap: time and launch cost.

    python benchmarks/bench_overlap.py             # everything, half an hour
    python benchmarks/bench_overlap.py loopback --models 10MB --repeats 20
    python benchmarks/bench_overlap.py hosts compressed launch

Two ranks on Gloo, AdamW, and a stack of square linear layers with biases, or a small transformer: 1.4 million
parameters in 75 tensors. Times are of the slowest rank, for zero_grad, forward, backward and step. The
allocator keeps freed memory, because new pages cost more than the compared effects, now on one side, now on
another. Writes results/overlap.json and .png.

One side is the ordinary loop with PyTorch's allreduce_hook, which averages like DDP without a hook: it shows
the cost of any communication hook in Python, before anything is overlapped.

The part "compressed" has gradients in 8 bits on both sides, with 1 Gbit/s between two hosts.

With T0 the ordinary loop's time, T ours, O the optimizer's own step and n the number of buckets, all but
the last bucket's step can be hidden: the efficiency is (T0 - T) / (O - O / n).
"""

from __future__ import annotations

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import memory
import torch
from drawing import bars_of, draw_bars
from harness import Benchmark, Found, Seconds, in_pairs, in_turns, load, of_slowest, print_times, spread
from rank_processes import on_ranks
from tasks import Encoder
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap import overlap_optimizer
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps
from ddp_optim_overlap.passes.bucket import lend_gradients
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

ORDINARY, HOOKED, PYTORCH, OURS, RELEASED = (
    "ordinary loop",
    "ordinary loop, hook",
    "PyTorch's overlap",
    "ours: overlapped step",
    "ours: release_gradients",
)
QUANTIZED, BOTH = "8 bits", "8 bits, ours: overlapped step"
SIDES = {
    "loopback": (ORDINARY, HOOKED, PYTORCH, OURS, RELEASED),
    "hosts": (ORDINARY, HOOKED, PYTORCH, OURS, RELEASED),
    "compressed": (ORDINARY, QUANTIZED, BOTH),
}
RATES = {"loopback": None, "hosts": "1gbit", "compressed": "1gbit"}
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


def make_net(model: str) -> nn.Module:
    """Return a stack of linear layers, or a transformer."""
    torch.manual_seed(0)
    if model not in LAYERS:
        return Encoder(WORDS, 128, heads=4, layers=6)
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


class Side:
    """A model that is trained in one way; a call makes a step."""

    def __init__(self, name: str, model: str, kind: str, batch: torch.Tensor) -> None:
        net = make_net(model)
        size = sum(parameter.nbytes for parameter in net.parameters()) / 2**20
        # This many buckets, or one more, from the second step on.
        self.ddp = ddp = DistributedDataParallel(net, bucket_cap_mb=size / BUCKETS[model])
        self._name, self._batch = name, batch
        self.handle: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        if name == PYTORCH:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its functional optimizers are deprecated
                ddp._register_fused_optim(torch.optim.AdamW, 1e-4, **{kind: True})  # noqa: SLF001 - the other side
            return
        self._optimizer = optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4, **{kind: True})  # type: ignore[arg-type]
        state, hook = QuantizedAllreduceState(), quantized_allreduce_hook
        if name == HOOKED:
            ddp.register_comm_hook(None, allreduce_hook)
        if name == QUANTIZED:
            ddp.register_comm_hook(state, hook)
        if name in (OURS, RELEASED):
            self.handle = overlap_optimizer(ddp, optimizer, release_gradients=name == RELEASED)
        if name == BOTH:
            self.handle = overlap_optimizer(ddp, optimizer, comm_hook=hook, comm_state=state)

    def __call__(self) -> Seconds:
        """Make a step; return the optimizer's own part of the ordinary loop."""
        self.ddp.zero_grad()
        self.ddp(self._batch).square().mean().backward()
        averaged = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        return Seconds({STEP: time.perf_counter() - averaged} if self._name == ORDINARY else {})


def measure(
    rank: int, names: Sequence[str], model: str, kind: str, rows: int, repeats: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the number of buckets and the seconds of every step of every side."""
    memory.keep_freed_memory()
    batch = make_batch(model, rows, seed=rank)
    sides = {name: Side(name, model, kind, batch) for name in names}
    seconds = in_turns(sides, repeats, warm_up=3)  # DDP rebuilds its buckets, and memory is allocated
    overlapped = next(side.handle for side in sides.values() if side.handle is not None)
    return overlapped.wait().buckets, seconds


def summarize(ranks: Sequence[tuple[int, dict[str, list[float]]]]) -> dict[str, Any]:
    """Return medians and quartiles of the slowest rank in ms, and the efficiency."""
    buckets, times = ranks[0][0], of_slowest([seconds for _, seconds in ranks])
    sides = {name: spread(values) for name, values in times.items()}
    step = statistics.median(times[STEP])
    for name, own in times.items():
        if name in (ORDINARY, STEP):
            continue
        # Differences within one turn, as the ratios: whatever slows the machine for a while slows both.
        saved = spread([plain - other for plain, other in zip(times[ORDINARY], own, strict=True)], unit="")
        sides[name] |= {"saved_ms": saved["median"], "saved_quartiles_ms": saved["quartiles"]}
        sides[name]["share_of"] = {
            base: round(statistics.median(in_pairs(own, times[base])), 3)
            for base in (ORDINARY, HOOKED, PYTORCH, QUANTIZED)
            if base in times
        }
        if QUANTIZED not in times:  # otherwise most of the saved time is not a step
            sides[name]["efficiency"] = round(saved["median"] / (step - step / buckets), 3)
    return {"buckets": buckets, "repeats": len(times[STEP]), "load_1_5_15_min": load(), "sides": sides}


def time_case(where: str, model: str, kind: str, rows: int, repeats: int) -> dict[str, Any]:
    """Return the summary of a model and a kind of step, on loopback or on two emulated hosts."""
    arguments = (SIDES[where], model, kind, rows, repeats)
    return summarize(on_ranks(measure, 2, *arguments, rate=RATES[where], timeout=900))


def whole_steps(where: str, options: Namespace) -> Iterator[Found]:
    """Measure every model and kind of step."""
    for model in [model for model in CASES[where] if model in options.models]:
        for kind in options.kinds:
            for rows in options.batches or CASES[where][model]:
                case = f"{model}, {kind}, batch {rows}"
                found = time_case(where, model, kind, rows, options.repeats)
                print_times(f"{where}, {case}, {found['buckets']} buckets, load {load()}", found["sides"])
                for name, side in found["sides"].items():
                    if "share_of" in side:
                        print(f"  {name:<24}in turns {side['share_of']}, efficiency {side.get('efficiency')}")
                yield (where, "cases", case), found


def launch_ways(kind: str, count: int, size: int) -> dict[str, Callable[[], None]]:
    """Return the ways to step ``count`` parameters of 64 values, ``size`` of them per bucket."""
    parameters = [nn.Parameter(torch.randn(64)) for _ in range(count)]
    gradients = [torch.randn(64) for _ in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    whole = torch.optim.AdamW(parameters, lr=1e-4, **{kind: True})  # type: ignore[arg-type]
    single = [torch.optim.AdamW([one], lr=1e-4, **{kind: True}) for one in parameters]  # type: ignore[arg-type]
    partial_steps = PartialSteps(whole)
    averaged = [gradient.clone() for gradient in gradients]

    def in_buckets() -> None:
        partial_steps.begin()
        for begin in range(0, count, size):
            part = parameters[begin : begin + size]
            with torch.no_grad(), lend_gradients(part, averaged[begin : begin + size]):
                partial_steps.step(part)
        partial_steps.finish()

    def one_by_one() -> None:
        for optimizer in single:
            optimizer.step()

    return {
        "one step": whole.step,
        "ours: steps of buckets": in_buckets,
        "one optimizer per parameter": one_by_one,
    }


def launch(_: Namespace) -> Iterator[Found]:
    """Measure one step of small parameters, as a whole, in buckets and one by one."""
    count, buckets, elements = 200, 10, 64
    torch.set_num_threads(1)
    for name, value in {"parameters": count, "elements": elements, "buckets": buckets}.items():
        yield ("launch", name), value
    for kind in KINDS:
        times = in_turns(launch_ways(kind, count, count // buckets), 200, warm_up=20)
        found = {name: spread([1e3 * one for one in seconds], digits=3) for name, seconds in times.items()}
        for entry in found.values():
            entry["of_one_step"] = round(entry["median_ms"] / found["one step"]["median_ms"], 2)
        print_times(f"AdamW, {kind}", found, "one step")
        yield ("launch", kind), found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the steps of the larger model, where there are any."""
    panels = {}
    for part, where in (("hosts", "two emulated hosts, 1 Gbit/s"), ("loopback", "two ranks, loopback")):
        for kind in ("fused", "foreach"):
            if found := results.get(part, {}).get("cases", {}).get(f"60MB, {kind}, batch 8"):
                bars = bars_of(found["sides"])
                panels[f"{where}; {kind}"] = {name: bars[name] for name in bars if name != STEP}
    draw_bars(panels, "ms", path, title="A training step with AdamW, 60 MB of parameters")


def main() -> None:
    """Run the requested parts."""
    benchmark = Benchmark(__file__, __doc__, repeats=41)
    add = benchmark.parser.add_argument
    add("--models", nargs="+", default=list(BUCKETS), choices=list(BUCKETS))
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    add("--batches", type=int, nargs="+", help="rows; default: 8, and for stacks on loopback also 64")
    benchmark.run({**{where: partial(whole_steps, where) for where in CASES}, "launch": launch}, draw=draw)


if __name__ == "__main__":
    main()
