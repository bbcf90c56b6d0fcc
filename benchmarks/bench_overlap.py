"""Overlapped optimizer steps against the ordinary loop and PyTorch's overlap.

    python benchmarks/bench_overlap.py             # everything, half an hour
    python benchmarks/bench_overlap.py loopback --models 10MB --repeats 20
    python benchmarks/bench_overlap.py hooks --repeats 25  # nine minutes

Two ranks on Gloo, AdamW, and a stack of square linear layers with biases, or a small transformer: 1.4 million
parameters in 75 tensors. Times are of the slowest rank, for zero_grad, forward, backward and step. The
allocator keeps freed memory, because new pages cost more than the compared effects, now on one side, now on
another. Writes results/overlap.json and .png.

One side is the ordinary loop with PyTorch's allreduce_hook, which averages like DDP without a hook: it shows
the cost of any communication hook in Python, before anything is overlapped.

The part "hooks" compares the ordinary and the overlapped loop with the same hook each: PyTorch's, in 16 bits,
and in 8 bits; on loopback and on two and four emulated hosts. Its cases of a slow wire repeat less often.

With T0 the ordinary loop's time, T ours, O the optimizer's own step and n the number of buckets, all but
the last bucket's step can be hidden: the efficiency is (T0 - T) / (O - O / n).
"""

from __future__ import annotations

import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
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

from ddp_compress_hooks import fp16_compress_hook
from ddp_optim_overlap import overlap_optimizer
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook

ORDINARY, HOOKED, PYTORCH, OURS, RELEASED = (
    "ordinary loop",
    "ordinary loop, hook",
    "PyTorch's overlap",
    "ours: overlapped step",
    "ours: release_gradients",
)
HALVED, HALVED_OURS = "16 bits", "16 bits, ours: overlapped step"
QUANTIZED, QUANTIZED_OURS = "8 bits", "8 bits, ours: overlapped step"
WITH_SAME_HOOK = {OURS: HOOKED, HALVED_OURS: HALVED, QUANTIZED_OURS: QUANTIZED}
SIDES = (ORDINARY, HOOKED, PYTORCH, OURS, RELEASED)
RATES = {"loopback": None, "hosts": "1gbit"}
STEP = "optimizer.step() alone"
BUCKETS = {"10MB": 10, "60MB": 15, "transformer": 10}
LAYERS = {"10MB": (256, 40), "60MB": (512, 60)}
"""The width and the number of layers of each stack."""
MEBIBYTES = {"10MB": 10.04, "60MB": 60.12, "transformer": 5.3}
CASES: dict[str, dict[str, tuple[int, ...]]] = {
    "loopback": {"10MB": (8, 64), "60MB": (8, 64), "transformer": (8,)},
    "hosts": {"10MB": (8,), "60MB": (8,)},
}
"""The rows of a batch, per model."""
SGD = "sgd"
KINDS = ("fused", "foreach", SGD)
"""Of AdamW, or SGD, which only the part "hooks" has."""
SMALL = [("10MB", "fused", 1), ("10MB", "foreach", 1)]
HOOK_CASES: dict[tuple[str | None, int], list[tuple[str, str, int]]] = {
    (None, 2): [
        *SMALL,
        ("10MB", SGD, 1),
        ("60MB", "fused", 4),
        ("60MB", "foreach", 4),
        ("60MB", "fused", 25),
    ],
    ("1gbit", 2): [*SMALL, ("10MB", SGD, 1), ("60MB", "fused", 4), ("60MB", "foreach", 25)],
    ("1gbit", 4): SMALL,
    ("200mbit", 2): SMALL,
    ("200mbit", 4): SMALL,
}
"""By the rate of the hosts' links (``None``: loopback) and ranks: model, optimizer, MiB of a bucket."""
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

    def __init__(self, name: str, model: str, kind: str, batch: torch.Tensor, bucket_mb: float) -> None:
        self.ddp = ddp = DistributedDataParallel(make_net(model), bucket_cap_mb=bucket_mb)
        self._name, self._batch = name, batch
        self.handle: Any = None
        self._optimizer: torch.optim.Optimizer | None = None
        if name == PYTORCH:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # its functional optimizers are deprecated
                ddp._register_fused_optim(torch.optim.AdamW, 1e-4, **{kind: True})  # noqa: SLF001 - the other side
            return
        self._optimizer = optimizer = make_optimizer(kind, ddp)
        if name == HOOKED:
            ddp.register_comm_hook(None, allreduce_hook)
        elif name in (HALVED, QUANTIZED):
            ddp.register_comm_hook(*hook_of(name))
        elif name != ORDINARY:
            state, hook = hook_of(name)
            released = name == RELEASED
            self.handle = overlap_optimizer(
                ddp, optimizer, comm_hook=hook, comm_state=state, release_gradients=released
            )

    def __call__(self) -> Seconds:
        """Make a step; return the optimizer's own part of the ordinary loop."""
        self.ddp.zero_grad()
        self.ddp(self._batch).square().mean().backward()
        averaged = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        return Seconds({STEP: time.perf_counter() - averaged} if self._name == ORDINARY else {})


def hook_of(side: str) -> tuple[Any, Any]:
    """Return the state and the hook of a side: with both ``None`` the overlap averages as DDP does."""
    if side in (HALVED, HALVED_OURS):
        return None, fp16_compress_hook
    if side in (QUANTIZED, QUANTIZED_OURS):
        return QuantizedAllreduceState(), quantized_allreduce_hook
    return None, None


def make_optimizer(kind: str, ddp: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW of a kind, or SGD with momentum."""
    if kind == SGD:
        return torch.optim.SGD(ddp.parameters(), lr=1e-4, momentum=0.9, foreach=True)
    return torch.optim.AdamW(ddp.parameters(), lr=1e-4, **{kind: True})  # type: ignore[arg-type]


def measure(
    rank: int, names: Sequence[str], model: str, kind: str, rows: int, bucket_mb: float, repeats: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the number of buckets and the seconds of every step of every side."""
    memory.keep_freed_memory()
    batch = make_batch(model, rows, seed=rank)
    sides = {name: Side(name, model, kind, batch, bucket_mb) for name in names}
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
            for base in {ORDINARY, HOOKED, PYTORCH, WITH_SAME_HOOK.get(name, ORDINARY)}
            if base in times
        }
        if QUANTIZED not in times:  # otherwise most of the saved time is not a step
            sides[name]["efficiency"] = round(saved["median"] / (step - step / buckets), 3)
    return {"buckets": buckets, "repeats": len(times[STEP]), "load_1_5_15_min": load(), "sides": sides}


def time_case(where: str, model: str, kind: str, rows: int, repeats: int) -> dict[str, Any]:
    """Return the summary of a model and a kind of step, on loopback or on two emulated hosts."""
    bucket_mb = MEBIBYTES[model] / BUCKETS[model]  # so many buckets, or one more, from the second step on
    arguments = (SIDES, model, kind, rows, bucket_mb, repeats)
    return summarize(on_ranks(measure, 2, *arguments, rate=RATES[where], timeout=900))


def whole_steps(where: str, options: Namespace) -> Iterator[Found]:
    """Measure every model and kind of step."""
    for model in [model for model in CASES[where] if model in options.models]:
        for kind in [kind for kind in options.kinds if kind != SGD]:
            for rows in options.batches or CASES[where][model]:
                case = f"{model}, {kind}, batch {rows}"
                found = time_case(where, model, kind, rows, options.repeats)
                print_times(f"{where}, {case}, {found['buckets']} buckets, load {load()}", found["sides"])
                for name, side in found["sides"].items():
                    if "share_of" in side:
                        print(f"  {name:<24}in turns {side['share_of']}, efficiency {side.get('efficiency')}")
                yield (where, "cases", case), found


def hooks(options: Namespace) -> Iterator[Found]:
    """Measure the ordinary and the overlapped loop with the same hook each."""
    names = (ORDINARY, *(side for pair in WITH_SAME_HOOK.items() for side in reversed(pair)))
    for (rate, ranks), cases in HOOK_CASES.items():
        where = "loopback" if rate is None else f"{ranks} hosts, {rate}"
        repeats = max(2, options.repeats // (1 if rate is None else 2 if rate == "1gbit" else 3))
        for model, kind, bucket_mb in cases:
            if model not in options.models or kind not in options.kinds:
                continue
            arguments = (names, model, kind, 8, float(bucket_mb), repeats)
            found = summarize(on_ranks(measure, ranks, *arguments, rate=rate, timeout=900))
            case = f"{where}, {model}, {kind}, buckets of {bucket_mb} MiB"
            shares = [found["sides"][name]["share_of"][base] for name, base in WITH_SAME_HOOK.items()]
            print_times(f"{case}, load {load()}", found["sides"])
            print(f"  in turns, of the ordinary loop with the same hook: {shares}", flush=True)
            yield ("hooks", case), found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the steps of the larger model, where there are any."""
    panels = {}
    for part, where in (("hosts", "two emulated hosts, 1 Gbit/s"), ("loopback", "two ranks, loopback")):
        for kind in ("fused", "foreach"):
            if found := results.get(part, {}).get("cases", {}).get(f"60MB, {kind}, batch 8"):
                bars = bars_of(found["sides"])
                panels[f"{where}; {kind}"] = {name: bars[name] for name in bars if name != STEP}
    draw_bars(panels, "ms", path, title="A training step with AdamW, 60 MB of parameters")


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=41)
    add = benchmark.parser.add_argument
    add("--models", nargs="+", default=list(BUCKETS), choices=list(BUCKETS))
    add("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    add("--batches", type=int, nargs="+", help="rows; default: 8, and for stacks on loopback also 64")
    parts = {where: partial(whole_steps, where) for where in CASES}
    benchmark.run({**parts, "hooks": hooks}, draw=draw)
