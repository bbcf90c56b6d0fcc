"""The results as Markdown, for documents. No table is wider than a phone: four columns of numbers at most."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from whole_steps.cells import CELLS, LOOPBACK, Cell
from whole_steps.losses import (
    AVERAGED,
    DILOCO,
    LABEL,
    LEARNT,
    POWER_SGD,
    THIN,
    Curve,
    complete,
    first_steps,
    loss_after,
    place_of,
    steps_after,
)
from whole_steps.sides import ALL, COMPUTE, OURS, OVERLAP, PLAIN, SHORT_LABELS, label

GAIN = 1.03
"""Less than 3 % is within the machine's noise."""
SHOWN = [
    name
    for name in ALL
    if name not in {"auto", *POWER_SGD} and (not name.endswith(OVERLAP) or name == f"8bits{OVERLAP}")
]
"""A sentence says what ``auto`` chose; PowerSGD and overlapped steps have pages of their own."""
CANDIDATES = {PLAIN, "bf16", "8bits"}
"""What ``auto`` may choose by default: 4 bits exceed its largest error."""
README_CELLS = (
    "7M, 2 hosts, 0.01 Gbit/s",
    "7M, 2 hosts, 0.1 Gbit/s",
    "7M, 2 hosts, 0.2 Gbit/s",
    "7M, 2 hosts of 2 ranks, 0.2 Gbit/s",
    "7M, 2 hosts, 1 Gbit/s",
    "7M, 2 ranks, loopback",
    "60M, 2 hosts, 1 Gbit/s",
    "MLP, 2 hosts, 1 Gbit/s",
)
README_LOSSES = [("7M", "0.1gbit"), ("7M", "1gbit")]


def tables(results: dict[str, Any]) -> str:
    """Return the tables of all steps, and of the first model's losses."""
    measured = results.get("cells", {})
    cells = {cell.name: measured[cell.name] for cell in CELLS if cell.name in measured}
    parts = [heading(cells), overview(cells)] if cells else []
    parts += [remarks(cells)] if cells else []
    learnt = results.get("losses", {})
    parts += [losses(LEARNT[0], learnt[LEARNT[0]])] if LEARNT[0] in learnt else []
    return "\n\n".join(parts)


def short_table(results: dict[str, Any]) -> str:
    """Return the README's table: few sides, one row for each of some cells."""
    cells = {name: results["cells"][name]["sides"] for name in README_CELLS if name in results["cells"]}
    shown = [side for side in SHORT_LABELS if any(side in sides for sides in cells.values())]
    labels = [SHORT_LABELS[side] for side in shown]
    rows = [
        [name, *(_time(sides.get(side), alone=side == PLAIN) for side in shown)]
        for name, sides in cells.items()
    ]
    losses = []
    for cell in _with_curves(results):
        if cell.name in cells and (cell.model, cell.rate) in README_LOSSES:
            earliest, reached = _reached(results, cell, shown)
            own = [_loss_and_steps(reached.get(side), 2) for side in shown]
            losses.append([f"{cell.name}, after {earliest:.0f} s", *own])
    steps = table(["ms a step (times as fast as plain DDP)", *labels], rows)
    return f"{steps}\n\n{table(['training loss (steps made)', *labels], losses)}"


class Reached(NamedTuple):
    """What a training reaches in some time: its loss, after so many steps."""

    loss: float
    steps: int


def equal_time(results: dict[str, Any]) -> str:
    """Return the losses that the first model has reached in equal time, by its curves and the measured steps.

    On each link of two hosts of one rank. The time is that in which the fastest side makes all steps.
    """
    cells = [cell for cell in _with_curves(results) if cell.model == LEARNT[0] and cell.rate != LOOPBACK]
    found = {cell.name: _reached(results, cell) for cell in cells}
    heads = [f"{name}, after {earliest:.0f} s" for name, (earliest, _) in found.items()]
    rows = [
        [LABEL[side], *(_loss_and_steps(reached.get(side), 3) for _, reached in found.values())]
        for side in ALL
        if any(side in reached for _, reached in found.values())
    ]
    return table(["training loss (steps made)", *heads], rows)


def _loss_and_steps(reached: Reached | None, digits: int) -> str:
    return f"{reached.loss:.{digits}f} ({reached.steps})" if reached else "-"


def _with_curves(results: dict[str, Any]) -> Iterator[Cell]:
    """Yield the cells of two hosts of one rank whose model has curves."""
    for cell in CELLS:
        curves, measured = results.get("losses", {}), results.get("cells", {})
        if cell.world_size == cell.hosts == 2 and cell.name in measured and cell.model in curves:
            yield cell


def _reached(
    results: dict[str, Any], cell: Cell, names: Sequence[str] = ALL
) -> tuple[float, dict[str, Reached]]:
    """Return the seconds in which the fastest side makes all steps, and what each has reached by then.

    A side in one bucket has the curve of the side in several, which rounds other blocks of the same values.
    """
    sides, entry = results["cells"][cell.name]["sides"], results["losses"][cell.model]
    curves, steps = complete(entry), entry["steps"]
    shown = {name: curves.get(name, curves.get(name.removesuffix("-one"))) for name in names}
    seconds = {name: _seconds_of_steps(name, sides, steps) for name, curve in shown.items() if curve}
    earliest = min(own[-1] for own in seconds.values() if own)
    found = {}
    for name, own in seconds.items():
        if own:
            made = THIN * (bisect_right(own, earliest) // THIN)
            points = slice(max(0, made - AVERAGED) // THIN, max(THIN, made) // THIN)
            losses = [statistics.fmean(curve["losses"][points]) for curve in shown[name] or ()]
            found[name] = Reached(statistics.fmean(losses), made)
    return earliest, found


def _seconds_of_steps(name: str, sides: dict[str, Any], steps: int) -> list[float]:
    """Return when each step of a training ends, by the medians of measured steps; nothing without them."""
    first, count = first_steps(name, steps)
    first = first if first in sides else "8bits"  # 4 bits were not measured everywhere
    medians = [sides.get(side, {}).get("median_ms") for side in (first, name)]
    if None in medians:
        return []
    before, after = medians
    return [*accumulate(1e-3 * (before if step < count else after) for step in range(steps))]


def _model(cell: str) -> str:
    return cell.split(",", maxsplit=1)[0]


def heading(cells: dict[str, Any]) -> str:
    """Describe where and when the cells were measured; several trees or machines are named as such."""
    runs = [side["run"] for cell in cells.values() for side in cell["sides"].values() if "run" in side]
    where = {
        f"torch {run['versions']['torch']}, {run['machine']['cores']} cores ({run['machine']['cpu']})"
        for run in runs
    }
    when = {f"{run['tree']} ({run['date']})" for run in runs}
    several = "several runs of commits" if len(when) > 1 else "commit"
    what = "ms for a training step; in parentheses: times as fast as plain DDP, by the median of turns. "
    return f"{what}{'; '.join(sorted(where))}, {several} {', '.join(sorted(when))}."


def overview(cells: dict[str, Any]) -> str:
    """Return tables of times, sides down and cells across.

    The first model has tables for two ranks, for more at 1 Gbit/s and on slower links; the others share one.
    """
    parts: dict[tuple[str, bool, bool], dict[str, Any]] = {}
    for cell in CELLS:
        if cell.name in cells:
            model = cell.model if cell.model == CELLS[0].model else ""
            key = (model, cell.world_size > 2, cell.world_size > 2 and cell.rate == "1gbit")
            parts.setdefault(key, {})[cell.name] = cells[cell.name]
    return "\n\n".join(map(_overview, parts.values()))


def _overview(cells: dict[str, Any]) -> str:
    sides = [cell["sides"] for cell in cells.values()]
    shown = [
        name
        for name in [COMPUTE, *SHOWN]
        if any(name in of_cell and "failed" not in of_cell[name] for of_cell in sides)
    ]
    models = set(map(_model, cells))
    heads = [name.split(", ", 1)[1] if len(models) == 1 else name for name in cells]
    rows = [[label(name), *(_time(of_cell.get(name)) for of_cell in sides)] for name in shown]
    return table([f"ms a step{f', {models.pop()}' if len(models) == 1 else ''}", *heads], rows)


def _time(side: dict[str, Any] | None, *, alone: bool = False) -> str:
    if side is None:
        return "-"
    if "failed" in side:
        return "fails"
    faster = None if alone else side.get("faster_than_plain")
    return f"{side['median_ms']:.0f}" + (f" ({faster['median']:.2f}x)" if faster else "")


def remarks(cells: dict[str, Any]) -> str:
    """Say where nothing is gained and what failed, and what ``auto`` chose."""
    return "\n".join(f"- {line}" for line in [*_gains(cells), *_failures(cells), *_choices(cells)])


def _gains(cells: dict[str, Any]) -> Iterator[str]:
    none = []
    for name, cell in cells.items():
        ratios = [
            side["faster_than_plain"]
            for key, side in cell["sides"].items()
            if key.removesuffix(OVERLAP) in OURS and "faster_than_plain" in side
        ]
        if ratios and not any(ratio["median"] >= GAIN and ratio["quartiles"][0] > 1 for ratio in ratios):
            none.append(f"{name} (at best {max(ratio['median'] for ratio in ratios):.2f}x)")
    if none:
        yield f"Nothing is gained by our hooks here: {'; '.join(none)}."


def _choices(cells: dict[str, Any]) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    shares = []
    for name, cell in cells.items():
        times = {side: found["median_ms"] for side, found in cell["sides"].items() if "median_ms" in found}
        if "auto" in times:
            places.setdefault(cell["sides"]["auto"]["chosen"]["candidate"], []).append(name)
            shares.append(times["auto"] / min(times[side] for side in CANDIDATES & times.keys()))
    if shares:
        usual, *others = sorted(places, key=lambda candidate: -len(places[candidate]))
        exceptions = "".join(f"; {choice} here: {', '.join(places[choice])}" for choice in others)
        yield (
            f"auto chose {usual}{exceptions}. Its steps took {min(shares):.2f} to {max(shares):.2f} of the "
            "fastest candidate's time."
        )


def _failures(cells: dict[str, Any]) -> Iterator[str]:
    failed: dict[tuple[str, str], list[str]] = {}
    for name, cell in cells.items():
        for key, side in cell["sides"].items():
            if "failed" in side:
                failed.setdefault((key, side["failed"]), []).append(name)
    for (key, error), names in failed.items():
        # Without the callbacks that an exception came through.
        cause = error.rsplit(": ", 1)[-1].split(". ")[0] if "Error: " in error else error
        yield f"{label(key)} fails ({cause}): {'; '.join(names)}."


def losses(model: str, entry: dict[str, Any]) -> str:
    """Return the losses after equal steps, and when the fastest hook has made all steps, with each seed."""
    curves = complete(entry)
    earliest = _earliest_end(curves)
    rows = [
        [LABEL[name], *_final(curve, curves.get(PLAIN)), f"{_end(curve):.0f}", _loss_after(curve, earliest)]
        for name, curve in curves.items()
        if not name.endswith(OVERLAP)  # The same bits.
    ]
    heads = [
        f"{place_of(model)}, emulated: training loss",
        f"after {entry['steps']} steps",
        "minus plain DDP's [of each seed]",
        f"seconds for {entry['steps']} steps",
        f"after {earliest:.0f} s (steps made)",
    ]
    return table(heads, rows)


def _end(curves: list[Curve]) -> float:
    return statistics.fmean(curve["seconds"][-1] for curve in curves)


def _earliest_end(curves: dict[str, list[Curve]]) -> float:
    """Return when the fastest hook has made all its steps, with each seed."""
    return min(
        max(curve["seconds"][-1] for curve in of_seeds) for name, of_seeds in curves.items() if name != DILOCO
    )


def _loss_after(curves: list[Curve], seconds: float) -> str:
    loss = statistics.fmean(loss_after(curve, seconds) for curve in curves)
    return f"{loss:.2f} ({statistics.fmean(steps_after(curve, seconds) for curve in curves):.0f})"


def _final(own: list[Curve], plain: list[Curve] | None) -> tuple[str, str]:
    mean = f"{statistics.fmean(curve['losses'][-1] for curve in own):.3f}"
    if plain is None or own is plain:
        return mean, ""
    differences = [mine["losses"][-1] - its["losses"][-1] for mine, its in zip(own, plain, strict=True)]
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    return mean, f"{statistics.fmean(differences):+.4f} [{each}]"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    head, *lines = (f"| {' | '.join(line)} |" for line in [heads, *rows])
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])
