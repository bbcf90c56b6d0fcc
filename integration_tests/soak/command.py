"""The command: inject faults, restart jobs, run long trainings, and write every outcome at once."""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import describe_machine, describe_tree
from trainings import BASELINES

from soak import page, wall_clock
from soak.faults import FAULTS
from soak.growth import measure_growth
from soak.injection import inject, why_skipped
from soak.network import network
from soak.restarts import restart

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.json"
HOSTS = 4
MOST_LATE = 0.05
"""The share of faults after which a rank may be late. On a busy machine Gloo misses a closed connection in 2
of 100, with plain DDP, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the command line selects; return 0 if every outcome is right."""
    options = _options(arguments)
    if options.page:
        page.PAGE.write_text(page.with_figures(page.PAGE.read_text(), json.loads(RESULTS.read_text())))
        return 0
    found: dict[str, Any] = {"outcomes": [], "restarts": [], "growth": []}
    with tempfile.TemporaryDirectory() as folder, network(HOSTS) as hosts:
        clock = wall_clock.preload(Path(folder))  # before any rank is started
        head = {**describe_machine(), "commit": describe_tree(), "seed": options.seed, "clock": clock}
        found["skipped"] = {name: why for name in FAULTS if (why := why_skipped(name, hosts))}
        for name, why in found["skipped"].items():
            print(f"skipped: {name}: {why}", flush=True)
        parts = (inject(options, hosts), restart(options), measure_growth(options))
        for name, outcomes in zip(("outcomes", "restarts", "growth"), parts, strict=True):
            for outcome in outcomes:
                found[name].append(outcome)
                if options.output is not None:
                    _save(options.output, {"head": head, **found})
                print(*(f"{key}={value}" for key, value in outcome.items() if key != "stacks"), flush=True)
    faults = [outcome for outcome in found["outcomes"] if outcome["training"] not in BASELINES]
    verdicts = Counter(one["verdict"] for one in (*faults, *found["restarts"], *found["growth"]))
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    return int(not set(verdicts) <= {"right", "torch's own"} or too_many_late(faults))


def too_many_late(outcomes: Sequence[dict[str, Any]]) -> bool:
    """Return whether ranks raise late more often than by what Gloo misses."""
    late = sum(outcome["late"] > 0 for outcome in outcomes)
    print(f"{late} of {len(outcomes)} late")
    return late > MOST_LATE * len(outcomes)


def _save(path: Path, results: dict[str, Any]) -> None:
    """Write results atomically, with one line per outcome."""
    parts = []
    for name, value in results.items():
        lines = ",\n  ".join(map(json.dumps, value)) if isinstance(value, list) else ""
        parts.append(f'"{name}": ' + (f"[\n  {lines}\n ]" if lines else json.dumps(value)))
    new = path.with_suffix(".new")
    new.write_text("{\n " + ",\n ".join(parts) + "\n}\n")
    new.replace(path)


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=500, help="how many to inject")
    add("--minutes", type=float, default=float("inf"), help="start no fault after this many minutes")
    add("--seed", type=int, default=0)
    add("--training", default="", help="how the names of trainings begin that are disturbed, as: low rank")
    add("--first", type=int, default=0, help="number of the first fault, to repeat one")
    add("--restarts", type=int, default=10, help="how many jobs to restart")
    add("--steps", type=int, default=10_000, help="steps of long runs; a tenth as many states, and so on")
    add("--page", action="store_true", help=f"only write the figures of {RESULTS.name} into the page")
    add("--output", type=Path, help="write every outcome at once to this file, such as the page's")
    return parser.parse_args(arguments)
