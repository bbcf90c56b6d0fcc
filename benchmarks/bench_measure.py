"""The measuring command on emulated hosts: its advice, its duration, and the accuracy of its estimates.

    python benchmarks/bench_measure.py                # everything, ten minutes; needs root
    python benchmarks/bench_measure.py estimates --repeats 11
    python benchmarks/bench_measure.py advice --cases "2 hosts, 1gbit"

"advice": links and hooks as the command measures them, on hosts with one rank each and on loopback; with the
recommended hook, the reasons, and the seconds that the command took.

"estimates": two hosts at 1 Gbit/s. The same processes measure, train models with each hook and without
communication (``no_sync``), and measure again. The estimate uses the model's size and the median step without
communication; it is compared with the median of the slowest rank's whole steps. Hooks take turns, forwards
and backwards; both estimates are stored, and their mean is compared.

Writes results/measure.json beside this file; running one part replaces only its own numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from hook_harness import run_on_hosts
from machine import describe_machine
from models import Transformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.measure import Model, Report, measure
from ddp_quant_hooks.measure.trials import hooks_to_try
from dist_utils import resolve_group
from dist_utils.testing import run_ranks

RESULTS = Path(__file__).parent / "results"
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

    def loss(model: nn.Module) -> torch.Tensor:
        return nn.functional.cross_entropy(model(letters).flatten(0, 1), letters.flatten())

    return Transformer(LETTERS, 320, heads=5, layers=6), loss


def wide_layers(rank: int) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Return linear layers with 17 million parameters, for which communication dominates."""
    rows = torch.randn(16, 1024, generator=torch.Generator().manual_seed(rank))
    layers = [layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.ReLU())]

    def loss(model: nn.Module) -> torch.Tensor:
        result: torch.Tensor = model(rows).square().mean()
        return result

    return nn.Sequential(*layers), loss


MODELS = {"transformer": transformer, "wide layers": wide_layers}


def train(rank: int, make: Callable[..., Any], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every step with each hook, and of steps without communication."""
    sides: dict[str, tuple[DistributedDataParallel, torch.optim.Optimizer, Any]] = {}
    for name, registered in {ALONE: None, **hooks_to_try(resolve_group(None))}.items():
        torch.manual_seed(0)
        model, loss = make(rank)
        ddp = DistributedDataParallel(model)
        if registered is not None:
            ddp.register_comm_hook(*registered)
        sides[name] = ddp, torch.optim.SGD(ddp.parameters(), lr=1e-3), loss
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(-3, repeats):  # DDP rebuilds its buckets, and memory is allocated
        for name in list(sides) if repeat % 2 else reversed(list(sides)):
            ddp, optimizer, loss = sides[name]
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            if name == ALONE and repeat > -3:
                with ddp.no_sync():
                    loss(ddp).backward()
            else:
                loss(ddp).backward()
            optimizer.step()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def compare(seconds: dict[str, list[float]], parameters: int, reports: list[Report]) -> dict[str, Any]:
    """Return measured and estimated steps of one model.

    Args:
        seconds: The slowest rank's seconds of every step, by side.
        parameters: The model's number of parameters.
        reports: The reports from before and after training.
    """
    medians = {name: statistics.median(steps) for name, steps in seconds.items()}
    model = Model(parameters, medians[ALONE])
    found: dict[str, Any] = {
        "parameters": parameters,
        "alone_ms": round(1e3 * medians[ALONE], 2),
        "hooks": {},
    }
    for name, measured in medians.items():
        if name == ALONE:
            continue
        steps = [report.for_model(model).estimate.steps[name].seconds for report in reports]  # type: ignore[union-attr]
        low, _, high = statistics.quantiles(seconds[name], n=4)
        found["hooks"][name] = {
            "measured_ms": round(1e3 * measured, 2),
            "measured_quartiles_ms": [round(1e3 * low, 2), round(1e3 * high, 2)],
            "estimated_ms": [round(1e3 * step, 2) for step in steps],
            "estimated_of_measured": round(statistics.mean(steps) / measured, 3),
        }
    return found


def slowest(group: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return the slowest rank's time of each step. Collective."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, group)
    return {name: [max(step) for step in zip(*(rank[name] for rank in ranks), strict=True)] for name in group}


def be_a_rank(folder: Path, options: argparse.Namespace) -> None:
    """Measure as one rank on an emulated host, and train models if there are any."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    reports = [measure(budget=options.budget)]
    trained = {name: slowest(train(rank, MODELS[name], options.repeats)) for name in options.models}
    found: dict[str, Any] = {"models": {}}
    if trained:
        reports.append(measure(budget=options.budget))
        for name, seconds in trained.items():
            parameters = sum(parameter.numel() for parameter in MODELS[name](rank)[0].parameters())
            found["models"][name] = compare(seconds, parameters, reports)
    found["reports"] = [report.as_dict() for report in reports]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_loopback(rank: int, budget: float) -> dict[str, Any]:
    """Measure as one of several local ranks."""
    del rank
    torch.set_num_threads(1)
    return measure(budget=budget).as_dict()


def measured_advice(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the command's advice for one case."""
    count, rate = CASES[case]
    began = time.perf_counter()
    if rate is None:
        report, *_ = run_ranks(on_loopback, count, options.budget, timeout=300)
    else:
        arguments = [f"--budget={options.budget}", "--models"]
        first, *_ = run_on_hosts([__file__, "rank"], arguments, count, rate=rate)
        (report,) = cast("Any", first)["reports"]
    return {
        "seconds_with_start": round(time.perf_counter() - began, 1),
        "seconds_measuring": round(report["seconds"], 1),
        "advice": report["advice"],
        "links": report["links"],
        "load_1_5_15_min": [round(value, 1) for value in os.getloadavg()],
        "hooks": {
            name: {
                f"{exchange['size'] >> 20} MiB": {
                    "ms": round(1e3 * exchange["seconds"], 2),
                    "repeats": exchange["repeats"],
                    "mb_sent": round(exchange["bytes_sent"] / 1e6, 3),
                    "mb_on_a_hosts_link": round(exchange["bytes_on_host_link"] / 1e6, 3),
                    "relative_error": float(f"{exchange['relative_error']:.3g}"),
                }
                for exchange in exchanges
            }
            for name, exchanges in report["hooks"].items()
        },
    }


def show_advice(case: str, found: dict[str, Any]) -> None:
    """Print one case."""
    print(
        f"{case}, {found['seconds_with_start']} s, {found['seconds_measuring']} s of them measuring", end=""
    )
    print(f", load {found['load_1_5_15_min']}")
    print(f"  take {found['advice']['hook']}")
    for reason in found["advice"]["reasons"]:
        print(f"  {reason}")


def show_estimates(models: dict[str, Any]) -> None:
    """Print measured and estimated steps."""
    for name, found in models.items():
        print(f"{name}, {found['parameters'] / 1e6:.1f} M parameters, {found['alone_ms']} ms alone")
        for hook, side in found["hooks"].items():
            print(
                f"  {hook:<8}{side['measured_ms']:>9} ms {side['measured_quartiles_ms']}, estimated", end=" "
            )
            print(f"{side['estimated_ms']}, {side['estimated_of_measured']} of measured", flush=True)


def main() -> None:
    """Run the requested parts, and write their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="all", choices=("all", "advice", "estimates", "rank"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--budget", type=float, default=40.0)
    options = parser.parse_args()
    if options.part == "rank":
        be_a_rank(options.folder, options)
        return
    path = RESULTS / "measure.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    if options.part in ("all", "advice"):
        cases = results.get("advice", {}).get("cases", {})
        for case in options.cases:
            cases[case] = measured_advice(case, options)
            show_advice(case, cases[case])
        results["advice"] = {**describe_machine(), "budget": options.budget, "cases": cases}
    if options.part in ("all", "estimates"):
        arguments = [f"--budget={options.budget}", f"--repeats={options.repeats}"]
        first, *_ = run_on_hosts(
            [__file__, "rank"], [*arguments, "--models", *options.models], 2, rate="1gbit"
        )
        models = cast("Any", first)["models"]
        show_estimates(models)
        results["estimates"] = {
            **describe_machine(),
            "hosts": 2,
            "rate": "1gbit",
            "repeats": options.repeats,
            "load_1_5_15_min": [round(value, 1) for value in os.getloadavg()],
            "models": models,
        }
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
