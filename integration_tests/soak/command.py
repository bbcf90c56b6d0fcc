"""The command: inject faults, restart jobs, run long trainings, and write every outcome at once."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soak import page, results, wall_clock
from soak.trainings import BASELINES

__all__ = ["main", "too_many_late"]

MOST_LATE = 0.05
"""The share of faults after which a rank may be late. On a busy machine Gloo misses a closed connection in 2
of 100, with plain DDP, too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the command line selects; return 0 if every outcome is right."""
    options = _options(arguments)
    if options.page:
        page.PAGE.write_text(page.with_figures(page.PAGE.read_text(), results.load(options.output)))
        return 0
    found = results.load(options.output) if options.keep else {}
    with tempfile.TemporaryDirectory() as folder:
        clock = wall_clock.preload(Path(folder))  # before any rank is started
        found |= {"head": {**results.head(), "seed": options.seed, "clock": clock}}

        def write(part: str, outcome: dict[str, Any]) -> None:
            others = [old for old in found.get(part, []) if not _is_again(old, outcome)]
            found[part] = [*others, outcome]
            results.save(options.output, found)
            print(_line(outcome), flush=True)

        began = time.monotonic()
        if options.faults:
            from soak.injected import inject  # noqa: PLC0415

            found["skipped"] = inject(options, lambda outcome: write("outcomes", outcome))
            found["head"]["seconds of faults"] = round(time.monotonic() - began)
        if options.restarts:
            from soak.restarts import restart  # noqa: PLC0415

            restart(options, lambda outcome: write("restarts", outcome))
        if options.steps:
            from soak.long_runs import run_long  # noqa: PLC0415

            run_long(options, lambda outcome: write("long_runs", outcome))
        if options.states or options.groups:
            from soak.churn import churn  # noqa: PLC0415

            churn(options, lambda outcome: write("churn", outcome))
    results.save(options.output, found)
    verdicts = Counter(
        outcome["verdict"] for part in results.LISTS for outcome in found.get(part, []) if _is_ours(outcome)
    )
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    faults = [outcome for outcome in found.get("outcomes", []) if _is_ours(outcome)]
    return int(not set(verdicts) <= {"right", "torch's own"} or too_many_late(faults))


def too_many_late(outcomes: Sequence[dict[str, Any]]) -> bool:
    """Return whether ranks raise late more often than by what Gloo misses."""
    late = sum(outcome.get("late", 0) > 0 for outcome in outcomes)
    if late:
        print(f"{late} of {len(outcomes)} late")
    return late > MOST_LATE * len(outcomes)


def _is_again(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two outcomes belong to the same job."""
    same = ("number", "training", "what", "seed") if "number" not in old else ("number",)
    return all(old.get(name) == new.get(name) for name in same)


def _is_ours(outcome: dict[str, Any]) -> bool:
    return outcome.get("training") not in BASELINES


def _line(outcome: dict[str, Any]) -> str:
    shown = {name: value for name, value in outcome.items() if name not in {"stacks", "errors"}}
    return " ".join(f"{name}={value}" for name, value in shown.items())


def _options(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=500, help="how many to inject")
    add("--minutes", type=float, default=float("inf"), help="start no fault after this many minutes")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=5.0, help="timeout of the ranks' groups, in seconds")
    add("--first", type=int, default=0, help="number of the first fault, to repeat one")
    add("--only", default="", help="only faults whose names contain this")
    add("--training", default="", help="only trainings whose names contain this")
    add("--restarts", type=int, default=10, help="how many jobs to restart")
    add("--steps", type=int, default=10_000, help="steps of each long run")
    add("--states", type=int, default=1000, help="how many states to make and close")
    add("--groups", type=int, default=100, help="how many process groups to make and destroy")
    add("--keep", action="store_true", help="keep outcomes in the file that are not run again")
    add("--page", action="store_true", help="only write the file's figures into docs/reliability.md")
    add("--output", type=Path, default=results.RESULTS)
    return parser.parse_args(arguments)
