"""The figures of docs/reliability.md, from the file that the soak run writes."""

from collections import Counter
from pathlib import Path
from typing import Any

from trainings import BASELINES

from soak.faults import FAULTS, STEADY

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
    return (
        f"**{len(faults)} faults: {verdicts['right']} right, {verdicts['wrong']} wrong, {verdicts['hung']} "
        f"hung.** Seed {head['seed']}, commit {head['commit']}, {head['date']}; torch {versions['torch']}, "
        f"Python {versions['python']}; {machine['cores']} cores ({machine['cpu']}). Clock: {head['clock']}."
    )


def _table(title: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [title, ["---"] * len(title), *rows])


def _faults(outcomes: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    rows = []
    for fault in sorted({_kind(outcome) for outcome in outcomes}):
        of_kind = [outcome for outcome in outcomes if _kind(outcome) == fault]
        seconds = sorted(second for outcome in of_kind for second in outcome["seconds"])
        right = sum(outcome["verdict"] == "right" for outcome in of_kind)
        late = sum(outcome["late"] > 0 for outcome in of_kind)
        spread = f"{seconds[len(seconds) // 2]:.2f} / {seconds[-1]:.2f}" if seconds else "-"
        rows.append([fault, f"{right}/{len(of_kind)}", str(late), spread])
    rows += [[fault, f"skipped: {why}", "", ""] for fault, why in skipped.items()]
    title = ["fault injected", "right, of all", "late", "seconds to the error: median / longest"]
    return _table(title, rows)


def _kind(outcome: dict[str, Any]) -> str:
    """Return the fault; those in the first steps apart, where peers cannot yet know that a rank is gone."""
    early = FAULTS[outcome["fault"]].gone and outcome["step"] < STEADY
    return outcome["fault"] + (", in the first three steps" if early else "")


def _restarts(found: list[dict[str, Any]]) -> str:
    right = sum(outcome["verdict"] == "right" for outcome in found)
    return found and (
        f"`torchrun --max-restarts=1`, a rank killed at a random moment: {len(found)} jobs, {right} of them "
        "with the bits of a job that ran through: parameters, optimizer states, residuals."
    )


def _growth(found: list[dict[str, Any]]) -> str:
    rows = []
    for outcome in found:
        growth, error, mean = (1000 * outcome["seconds"][name] for name in ("growth", "error", "mean"))
        memory = outcome.get("heap") or outcome["kibibytes"]  # in runs that did not record the first
        rows.append(
            [
                f"{outcome['count']} x {outcome['what']}",
                f"{memory['growth']:.0f} ± {memory['error']:.0f}",
                *(f"{outcome[what]['growth']:.0f}" for what in ("descriptors", "kernel_threads")),
                f"{growth:.1f} ± {error:.1f} of {mean:.1f}",
                outcome["verdict"],
            ]
        )
    return found and (
        "Growth over the last three quarters of each loop, on the rank where it is largest, with the "
        "regression's standard error.\n\n"
        + _table(["", "KiB", "descriptors", "threads", "ms each", "verdict"], rows)
    )
