"""The figures of docs/reliability.md, from the file that the soak run writes."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "figures", "with_figures"]

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: written by `nox -s soak -- --page` -->\n", "<!-- end of figures -->\n"
BASELINES = ("plain DDP", "plain FSDP2")


def with_figures(page: str, results: dict[str, Any]) -> str:
    """Return the page with the figures of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + figures(results) + "\n" + END + after


def figures(results: dict[str, Any]) -> str:
    """Return the tables."""
    parts = [_head(results), _faults(results), _restarts(results), _long_runs(results), _churn(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(results: dict[str, Any]) -> str:
    head = results["head"]
    machine, versions = head["machine"], head["versions"]
    ours = [outcome for outcome in results.get("outcomes", []) if outcome["training"] not in BASELINES]
    verdicts = Counter(outcome["verdict"] for outcome in ours)
    took = statistics.mean([outcome["took"] for outcome in results.get("outcomes", [])] or [0])
    return (
        f"**{len(ours)} faults: {verdicts['right']} right, {verdicts['wrong']} wrong, {verdicts['hung']} "
        f"hung.** Seed {head['seed']}, commit {head['commit']}, {head['date']}; torch {versions['torch']}, "
        f"Python {versions['python']}; {machine['cores']} cores ({machine['cpu']}); {took:.1f} s a fault. "
        f"Clock: {head['clock']}."
    )


def _faults(results: dict[str, Any]) -> str:
    rows = []
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for outcome in results.get("outcomes", []):
        if outcome["training"] not in BASELINES:
            groups[outcome["fault"] + _when(outcome)].append(outcome)
    for fault, outcomes in sorted(groups.items()):
        seconds = sorted(second for outcome in outcomes for second in outcome["seconds"])
        spread = f"{_at(seconds, 0.5):.2f} / {_at(seconds, 1.0):.2f}" if seconds else "-"
        verdicts = Counter(outcome["verdict"] for outcome in outcomes)
        told, named = (sum(outcome[key] for outcome in outcomes) for key in ("told", "named"))
        verdicts["late"] = sum(outcome.get("late", 0) > 0 for outcome in outcomes)
        others = "".join(
            f", {count} {which}" for which in ("late", "wrong", "hung") if (count := verdicts[which])
        )
        rows.append(
            f"| {fault} | {verdicts['right']}/{len(outcomes)}{others} | {spread} | "
            f"{f'{named} of {told}' if told else '-'} |"
        )
    for fault, why in results.get("skipped", {}).items():
        rows.append(f"| {fault} | skipped: {why} | | |")
    title = (
        "| fault injected | right, of all | seconds to the error: median / longest | errors that name the "
        "rank |\n|---|---|---|---|"
    )
    return "\n".join([title, *rows]) if rows else ""


def _when(outcome: dict[str, Any]) -> str:
    """Mark faults in the first steps, in which peers cannot yet know that a rank is gone."""
    gone = outcome["fault"].startswith(("kill", "raises", "no more", "disk"))
    return ", in the first three steps" if gone and outcome["step"] < 3 else ""


def _at(values: Sequence[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))]


def _restarts(results: dict[str, Any]) -> str:
    found = results.get("restarts", [])
    if not found:
        return ""
    right = sum(outcome["verdict"] == "right" for outcome in found)
    return (
        f"`torchrun --max-restarts=1`, a rank killed at a random moment: {len(found)} jobs, {right} of them "
        "with the bits of a job that ran through: parameters, optimizer states, residuals."
    )


def _long_runs(results: dict[str, Any]) -> str:
    runs = {outcome["training"]: outcome for outcome in results.get("long_runs", [])}
    if not runs:
        return ""
    steps = sorted({outcome["steps"] for outcome in runs.values()})
    title = (
        f"Growth over three quarters of {', '.join(map(str, steps))} steps on the rank where it is largest, "
        'with the regression\'s standard error where it is not zero, and "of" the mean.'
    )
    return f"{title}\n\n{_growth(runs, 'ms a step')}"


def _churn(results: dict[str, Any]) -> str:
    found = {f"{outcome['count']} {outcome['what']}": outcome for outcome in results.get("churn", [])}
    return _growth(found, "ms each") if found else ""


def _growth(found: dict[str, dict[str, Any]], time: str) -> str:
    """Return a table with a row for each training or cycle."""
    rows = [["", "KiB in use", "KiB resident", "descriptors", "threads", time, "verdict"], ["---"] * 7]
    for name, outcome in found.items():
        rows.append([name, *_lines(outcome), outcome["verdict"]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _lines(outcome: dict[str, Any]) -> Iterator[str]:
    for what in ("heap", "kibibytes"):
        line = outcome.get(what)
        yield f"{line['growth']:.0f} ± {line['error']:.0f}" if line else "-"
    for what in ("descriptors", "kernel_threads"):
        line = outcome[what]
        yield f"{line['growth']:.0f} of {line['mean']:.0f}"
    line = outcome["seconds"]
    yield f"{1000 * line['growth']:.1f} ± {1000 * line['error']:.1f} of {1000 * line['mean']:.1f}"
