"""The figures of docs/reliability.md, from the file that the soak run writes."""

from collections import Counter
from pathlib import Path
from typing import Any

from trainings import BASELINES

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- figures: written by `nox -s soak -- --page` -->\n", "<!-- end of figures -->\n"


def with_figures(page: str, results: dict[str, Any]) -> str:
    """Return the page with the figures of these results."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    faults = [outcome for outcome in results["outcomes"] if outcome["training"] not in BASELINES]
    parts = [_head(results["head"], faults), _faults(faults, results.get("skipped", {}))]
    parts += [_restarts(results["restarts"]), _growth(results["growth"])]
    figures = "\n\n".join(part for part in parts if part)
    return f"{before}{BEGIN}\n{figures}\n\n{END}{after}"


def _head(head: dict[str, Any], faults: list[dict[str, Any]]) -> str:
    machine, versions = head["machine"], head["versions"]
    verdicts = Counter(outcome["verdict"] for outcome in faults)
    late = sum(outcome["late"] > 0 for outcome in faults)
    again = sum(outcome.get("commit", head["commit"]) != head["commit"] for outcome in faults)
    repeated = f" {again} of them are of a second run, after corrections." if again else ""
    return (
        f"**{len(faults)} faults: {verdicts['right']} right, {verdicts['wrong']} wrong, {verdicts['hung']} "
        f"hung, {late} late.{repeated}** Seed {head['seed']}, commit {head['commit']}, {head['date']}; torch "
        f"{versions['torch']}, Python {versions['python']}; {machine['cores']} cores ({machine['cpu']})."
    )


def _faults(outcomes: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    lines = ["| fault | right, of all | seconds to the error: median / longest |", "|---|---|---|"]
    ended = {outcome["fault"] for outcome in outcomes if outcome["seconds"]}
    rows: dict[str, list[str]] = {}  # All faults without an error share one, so do all that raise.
    for fault in sorted({outcome["fault"] for outcome in outcomes}):
        rows.setdefault(fault.partition(" in ")[0] if fault in ended else "", []).append(fault)
    for faults in rows.values():
        of_row = [outcome for outcome in outcomes if outcome["fault"] in faults]
        seconds = sorted(second for outcome in of_row for second in outcome["seconds"])
        right = sum(outcome["verdict"] == "right" for outcome in of_row)
        middle_and_last = [round(seconds[place], 2) + 0.0 for place in (len(seconds) // 2, -1) if seconds]
        spread = " / ".join(f"{second:.2f}" for second in middle_and_last) or "no error"
        lines.append(f"| {', '.join(faults)} | {right}/{len(of_row)} | {spread} |")
    lines += [f"| {fault} | skipped: {why} | |" for fault, why in skipped.items()]
    return "\n".join(lines)


def _restarts(found: list[dict[str, Any]]) -> str:
    right = sum(outcome["verdict"] == "right" for outcome in found)
    return found and (
        f"`torchrun --max-restarts=1`, a rank killed at a random moment: {right} of {len(found)} jobs ended "
        "with the bits of a job that ran through."
    )


def _growth(found: list[dict[str, Any]]) -> str:
    ours = [outcome for outcome in found if outcome["verdict"] != "torch's own"]
    grew = sum(outcome["verdict"] != "right" for outcome in ours)
    steps = max((outcome["count"] for outcome in ours), default=0)
    return ours and (
        f"Of {len(ours)} long runs, of up to {steps:,} steps, {grew or 'none'} grew in memory, descriptors, "
        "threads or time."
    )
