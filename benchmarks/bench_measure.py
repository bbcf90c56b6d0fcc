"""The measuring command on emulated hosts: its advice, its duration, and the accuracy of its estimates.

    python benchmarks/bench_measure.py                # everything, ten minutes; needs root
    python benchmarks/bench_measure.py estimates --repeats 11
    python benchmarks/bench_measure.py advice --cases "2 hosts, 1gbit"

"advice": links and hooks as the command measures them, on hosts with one rank each and on loopback; with the
recommended hook, the reasons, and the seconds that the command took.

"estimates": two hosts at 1 Gbit/s. The same processes measure, train models with each hook and without
communication (``no_sync``), and measure again. The estimate uses the model's size and the median step without
communication; it is compared with the median of the slowest rank's whole steps; both estimates are stored,
and their mean is compared. Writes results/measure.json.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Benchmark, Found, in_turns, load, of_slowest, spread
from rank_processes import on_ranks
from tasks import Encoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.auto.candidates import Candidate, default_candidates
from ddp_quant_hooks.measure import Model, Report, measure

ALONE = "without communication"
CASES = {
    "2 ranks, loopback": (2, None),
    "8 ranks, loopback": (8, None),
    "2 hosts, 10gbit": (2, "10gbit"),
    "2 hosts, 1gbit": (2, "1gbit"),
    "8 hosts, 1gbit": (8, "1gbit"),
    "2 hosts, 100mbit": (2, "100mbit"),
    "8 hosts, 100mbit": (8, "100mbit"),
}
"""Numbers of ranks, and the rates of their links."""
LETTERS, LETTERS_IN_ROW = 96, 64


def transformer(rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return the model, and a function that computes a batch's loss with it."""
    generator = torch.Generator().manual_seed(rank)
    letters = torch.randint(0, LETTERS, (8, LETTERS_IN_ROW), generator=generator)
    model = Encoder(LETTERS, 320, heads=5, layers=6)
    return model, lambda ddp: nn.functional.cross_entropy(ddp(letters).flatten(0, 1), letters.flatten())


def wide_layers(rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return linear layers with 17 million parameters, for which communication dominates."""
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(rank))
    layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers), lambda ddp: ddp(rows).square().mean()


MODELS = {"transformer": transformer, "wide layers": wide_layers}


def side(
    rank: int, make: Callable[..., Any], candidate: Candidate | None, *, alone: bool
) -> Callable[[], None]:
    """Return a call that makes a step with a hook, without the other ranks if ``alone``."""
    torch.manual_seed(0)
    model, loss = make(rank)
    ddp = DistributedDataParallel(model)
    if candidate is not None:
        ddp.register_comm_hook(candidate.state, candidate.hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    steps = itertools.count()

    def step() -> None:
        optimizer.zero_grad()
        with ddp.no_sync() if alone and next(steps) > 0 else contextlib.nullcontext():
            loss(ddp).backward()
        optimizer.step()

    return step


def measure_and_train(
    rank: int, budget: float, repeats: int, models: list[str]
) -> tuple[list[Report], dict[str, tuple[int, dict[str, list[float]]]]]:
    """Return reports from before and after training, and every model's size and seconds of steps."""
    reports, trained = [measure(budget=budget)], {}
    for name in models:
        make = MODELS[name]
        hooks = {ALONE: None, **default_candidates()}
        sides = {hook: side(rank, make, found, alone=hook == ALONE) for hook, found in hooks.items()}
        seconds = in_turns(sides, repeats, warm_up=3)  # DDP rebuilds its buckets, and memory is allocated
        trained[name] = sum(parameter.numel() for parameter in make(rank)[0].parameters()), seconds
    return [*reports, measure(budget=budget)], trained


def compare(parameters: int, times: dict[str, list[float]], reports: list[Report]) -> dict[str, Any]:
    """Return measured and estimated steps of one model.

    Args:
        parameters: The model's number of parameters.
        times: The slowest rank's ms of every step, by side.
        reports: The reports from before and after training.
    """
    alone = statistics.median(times[ALONE])
    estimates = [report.for_model(Model(parameters, alone / 1e3)).estimate for report in reports]
    hooks = {}
    for name, steps in times.items():
        if name == ALONE:
            continue
        estimated = [1e3 * found.steps[name].seconds for found in estimates if found is not None]
        measured = spread(steps)
        hooks[name] = {
            "measured_ms": measured["median_ms"],
            "measured_quartiles_ms": measured["quartiles_ms"],
            "estimated_ms": [round(step, 2) for step in estimated],
            "estimated_of_measured": round(statistics.mean(estimated) / statistics.median(steps), 3),
        }
    return {"parameters": parameters, "alone_ms": round(alone, 2), "hooks": hooks}


def estimates(options: Namespace) -> Iterator[Found]:
    """Measure and estimate the steps of every model."""
    arguments = (options.budget, options.repeats, options.models)
    ranks = on_ranks(measure_and_train, 2, *arguments, rate="1gbit")
    for name in options.models:
        times = of_slowest([trained[name][1] for _, trained in ranks])
        (reports, trained), *_ = ranks
        found = compare(trained[name][0], times, reports)
        print(f"{name}, {found['parameters'] / 1e6:.1f} M parameters, {found['alone_ms']} ms alone, {load()}")
        for hook, entry in found["hooks"].items():
            print(f"  {hook:<8}{entry}")
        yield ("estimates", "models", name), found


def report_of(rank: int, budget: float) -> Report:  # noqa: ARG001 - run_ranks gives it
    """Measure as one of the ranks."""
    return measure(budget=budget)


def advice(options: Namespace) -> Iterator[Found]:
    """Measure every case, as the command does."""
    for case in options.cases:
        count, rate = CASES[case]
        began = time.perf_counter()
        report = on_ranks(report_of, count, options.budget, rate=rate, timeout=300)[0].as_dict()
        found = {
            "seconds_with_start": round(time.perf_counter() - began, 1),
            "seconds_measuring": round(report["seconds"], 1),
            "advice": report["advice"],
            "links": report["links"],
            "load_1_5_15_min": load(),
            "hooks": {name: exchanges_of(found) for name, found in report["hooks"].items()},
        }
        print(f"{case}, {found['seconds_with_start']} s, load {found['load_1_5_15_min']}")
        print(f"  take {report['advice']['hook']}: {' '.join(report['advice']['reasons'])}", flush=True)
        yield ("advice", "cases", case), found


def exchanges_of(exchanges: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a report says of a hook, by the size of the exchange."""
    return {
        f"{exchange['size'] >> 20} MiB": {
            "ms": round(1e3 * exchange["seconds"], 2),
            "repeats": exchange["repeats"],
            "mb_sent": round(exchange["bytes_sent"] / 1e6, 3),
            "mb_on_a_hosts_link": round(exchange["bytes_on_host_link"] / 1e6, 3),
            "relative_error": float(f"{exchange['relative_error']:.3g}"),
        }
        for exchange in exchanges
    }


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=31)
    add = benchmark.parser.add_argument
    add("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    add("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    add("--budget", type=float, default=40.0)
    benchmark.run({"advice": advice, "estimates": estimates})
