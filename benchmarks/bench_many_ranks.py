"""Averages among many ranks: a cost model fitted here, and predictions of larger clusters.

    python benchmarks/bench_many_ranks.py              # everything, half an hour; emulated hosts need root
    python benchmarks/bench_many_ranks.py curve        # with the model of results/many_ranks.json
    python benchmarks/bench_many_ranks.py measure --loopback  # on a machine with a core for each of 16 ranks
    python benchmarks/bench_many_ranks.py measure --output benchmarks/results/many_ranks_hosts.json

"measure": one bucket of several sizes, fp32 around Gloo's ring and in 8 bits, on loopback and on emulated
hosts, and the kernels alone. Each figure is the minimum over the repeats, and over several runs of this part,
because other programs on the machine only add time.

"fit": fits the cost model to some of these cases, and compares it with the others. "cases" and "curve": play
the schedules of all ranks, recorded from the project's own routes, on clusters that were not measured.
"plot": draws the curves.

Writes results/many_ranks.json and .png beside this file. Everything from "cases" and "curve" is a prediction,
and labeled so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from machine import describe_machine
from many_ranks.fitting import Case, Model, compare, fit, fit_kernels
from many_ranks.measuring import HOOKS, be_a_rank, measure_case, measure_kernels, measure_starting
from many_ranks.plots import draw
from many_ranks.predicting import predict_all

FILE = Path(__file__).parent / "results" / "many_ranks.json"
HOSTS = FILE.with_name("many_ranks_hosts.json")
"""Of a machine that emulates hosts, if the other one does not: their wires are in the predictions."""
MIB = 1 << 20
SIZES = [1 << 16, MIB, 4 * MIB, 10 * MIB, 25 * MIB]
PLACES: list[tuple[int, float | None]] = [
    *((count, None) for count in (2, 4, 6, 8, 12, 16)),
    *((count, gbit) for gbit in (1.0, 10.0) for count in (2, 4, 6, 8)),
]
HELD_BACK_WORLDS, HELD_BACK_SIZE = (6, 12), 10 * MIB


def measure(known: dict[str, Any], repeats: int, *, loopback: bool = False) -> dict[str, Any]:
    """Measure everything, or loopback alone, and keep what was faster before."""
    cases = known.get("cases", {})
    for world, gbit in PLACES:
        if loopback and gbit is not None:
            continue
        name = f"{world} ranks, loopback" if gbit is None else f"{world} hosts, {gbit:g} Gbit/s"
        place = cases.setdefault(name, {"world": world, "gbit": gbit, "times": {}})
        found = measure_case(world, gbit, SIZES, repeats, __file__)
        for key, entry in found.items():
            before = place["times"].get(key, entry)
            place["times"][key] = {**entry, "fastest": min(entry["fastest"], before["fastest"])}
        print(
            name, {key: round(1e3 * entry["fastest"], 2) for key, entry in place["times"].items()}, flush=True
        )
    return {
        **describe_machine(),
        "repeats": known.get("repeats", 0) + repeats,
        "kernels": measure_kernels(),
        "starting": measure_starting(),
        "cases": cases,
    }


def fit_all(results: Mapping[str, Any]) -> dict[str, Any]:
    """Fit both hooks' models, and compare them with all cases."""
    kernels, starting = fit_kernels(results["kernels"]), results["starting"]["starting"]
    found: dict[str, Any] = {"kernels": {name: asdict(one) for name, one in kernels.items()}}
    for hook in HOOKS:
        own = [case for case in _cases(results) if case.hook == hook]
        model = fit([case for case in own if not _held_back(case)], kernels, starting)
        rows = [
            {**row, "held_back": _held_back(case)}
            for row, case in zip(compare(model, own, kernels, starting), own, strict=True)
        ]
        found[hook] = {"model": asdict(model), "cases": rows}
    return found


def _cases(results: Mapping[str, Any]) -> list[Case]:
    return [
        Case(hook, place["world"], place["gbit"], int(size), entry["fastest"], results["machine"]["cores"])
        for place in results["cases"].values()
        for key, entry in place["times"].items()
        for hook, size in [key.rsplit(", ", 1)]
    ]


def _held_back(case: Case) -> bool:
    return case.world in HELD_BACK_WORLDS or case.size == HELD_BACK_SIZE


def models_of(results: Mapping[str, Any], on_hosts: Mapping[str, Any]) -> dict[str, Model]:
    """Return the model of each hook: fitted where ranks have cores, with the wires of emulated hosts."""
    found = {}
    for hook in HOOKS:
        model = Model(**results["fit"][hook]["model"])
        if "fit" in on_hosts:
            wires = Model(**on_hosts["fit"][hook]["model"])
            model = replace(model, latency_on_hosts=wires.latency_on_hosts, payload=wires.payload)
        found[hook] = model
    return found


def report_fit(fitted: Mapping[str, Any]) -> None:
    """Print the model's figure for every case."""
    for hook in HOOKS:
        entry = fitted[hook]
        print(f"\n{hook}: {entry['model']}")
        for row in entry["cases"]:
            where = "loopback" if row["gbit"] is None else f"{row['gbit']:g} Gbit/s"
            kept = ", held back" if row["held_back"] else ""
            print(
                f"  {row['world']:3} ranks, {where:<10} {row['size'] / MIB:6.2f} MiB: measured "
                f"{1e3 * row['seconds']:8.2f} ms, model {1e3 * row['model']:8.2f} ({row['ratio']:.2f}{kept})"
            )
        for kept in (False, True):
            errors = sorted(abs(row["ratio"] - 1) for row in entry["cases"] if row["held_back"] == kept)
            within = sum(error <= 0.15 for error in errors)
            print(
                f"  {'held back' if kept else 'fitted'}: median error {errors[len(errors) // 2]:.0%}, "
                f"within 15 %: {within} of {len(errors)}, largest {errors[-1]:.0%}"
            )


def main() -> None:
    """Run the chosen parts, and print and store their results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["measure", "fit", "cases", "curve", "plot"]
    parser.add_argument("part", nargs="?", choices=["all", *parts, "rank"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--loopback", action="store_true", help="measure without emulated hosts")
    parser.add_argument("--output", type=Path, default=FILE, help="the results, also those of other parts")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--most-ranks", type=int, default=4096, help="ranks of the largest simulated cluster")
    options = parser.parse_args()
    if options.part == "rank":
        be_a_rank(options.folder, options.sizes, options.repeats)
        return
    file = options.output
    wants = parts if options.part == "all" else [options.part]
    if "measure" in wants:
        known = {} if options.part == "all" else read(file)
        write(file, measure(known, options.repeats, loopback=options.loopback))
    if "fit" in wants:
        fitted = fit_all(read(file))
        report_fit(fitted)
        write(file, {"fit": fitted})
    if playing := [part for part in wants if part in {"cases", "curve"}]:
        results = read(file)
        models = models_of(results, read(HOSTS))
        starting = results["starting"]["starting"]
        found = predict_all(models, fit_kernels(results["kernels"]), starting, options.most_ranks, playing)
        write(file, {"predictions": {**results.get("predictions", {}), **found}})
    if "plot" in wants:
        draw(read(file)["predictions"], file.with_suffix(".png"))
    print(f"written: {file}")


def read(file: Path) -> dict[str, Any]:
    """Return what was found so far."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def write(file: Path, found: Mapping[str, Any]) -> None:
    """Replace what was found of these parts."""
    file.write_text(json.dumps({**read(file), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
