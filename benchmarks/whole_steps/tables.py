"""The results as Markdown, for documents. No table is wider than a phone: five columns of numbers at most."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from whole_steps.cells import CELLS, LOOPBACK, Cell
from whole_steps.losses import (
    AVERAGED,
    LABEL,
    LEARNT,
    POWER_SGD,
    THIN,
    Curve,
    complete,
    curve_of,
    place_of,
    seconds_of_steps,
)
from whole_steps.sides import ALL, COMPUTE, LOW_RANK, OURS, OVERLAP, PLAIN, SHORT_LABELS, label

GAIN = 1.03
"""Less than 3 % is within the machine's noise."""
FACTORS = [*POWER_SGD, *LOW_RANK]
"""Sides that send factors of gradients."""
SHOWN = [
    name
    for name in ALL
    if name in {"powersgd-one", "low-rank-one", f"8bits{OVERLAP}"}
    or not (name == "auto" or name in FACTORS or name.endswith(OVERLAP))
]
"""A sentence says what ``auto`` chose; factors and overlapped steps have pages of their own."""
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
SLOW = ("0.2gbit", "0.1gbit", "0.01gbit")
SHOWN_LOSSES = ("7M", "conv")
README_SIDES = (PLAIN, "powersgd-one", "8bits", "low-rank-one")
README_LOSSES = [("7M", "0.1gbit"), ("7M", "1gbit")]


def tables(results: dict[str, Any]) -> str:
    """Return the tables of all steps, and of losses after equal steps."""
    measured = results.get("cells", {})
    cells = {cell.name: measured[cell.name] for cell in CELLS if cell.name in measured}
    parts = [heading(cells), overview(cells)] if cells else []
    parts += [remarks(cells)] if cells else []
    learnt = results.get("losses", {})
    parts += [losses(learnt)] if learnt else []
    return "\n\n".join(parts)


def factors_table(results: dict[str, Any]) -> str:
    """Return the table of all sides that send factors, where several ranks of them were measured."""
    cells = {
        cell.name: results["cells"][cell.name]
        for cell in CELLS
        if "powersgd4-one" in results["cells"].get(cell.name, {"sides": {}})["sides"]
    }
    return _overview(cells, [PLAIN, *FACTORS])


def short_table(results: dict[str, Any]) -> str:
    """Return the README's table: few sides, one row for each of some cells."""
    cells = {name: results["cells"][name]["sides"] for name in README_CELLS if name in results["cells"]}
    labels = [SHORT_LABELS[side] for side in README_SIDES]
    rows = [
        [name, *(_time(sides.get(side), alone=side == PLAIN) for side in README_SIDES)]
        for name, sides in cells.items()
    ]
    losses = []
    for cell in _with_curves(results):
        if cell.name in cells and (cell.model, cell.rate) in README_LOSSES:
            earliest, reached = _reached(results, cell, README_SIDES)
            own = [_loss_and_steps(reached.get(side), 2) for side in README_SIDES]
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
    if reached is None or not reached.steps:
        return "-" if reached is None else "- (0)"
    return f"{reached.loss:.{digits}f} ({reached.steps})"


def _with_curves(results: dict[str, Any]) -> Iterator[Cell]:
    """Yield the cells of two hosts of one rank whose model has curves."""
    for cell in CELLS:
        curves, measured = results.get("losses", {}), results.get("cells", {})
        if cell.world_size == cell.hosts == 2 and cell.name in measured and cell.model in curves:
            yield cell


def _reached(
    results: dict[str, Any], cell: Cell, names: Sequence[str] = ALL
) -> tuple[float, dict[str, Reached]]:
    """Return the seconds in which the fastest side makes all steps, and what each has reached by then."""
    sides, entry = results["cells"][cell.name]["sides"], results["losses"][cell.model]
    curves, steps = complete(entry), entry["steps"]
    shown = {name: curves.get(curve_of(name)) for name in names}
    seconds = {name: seconds_of_steps(name, sides, steps) for name, curve in shown.items() if curve}
    earliest = min(own[-1] for own in seconds.values() if own)
    found = {}
    for name, own in seconds.items():
        if own:
            made = THIN * (bisect_right(own, earliest) // THIN)
            points = slice(max(0, made - AVERAGED) // THIN, max(THIN, made) // THIN)
            losses = [statistics.fmean(curve["losses"][points]) for curve in shown[name] or ()]
            found[name] = Reached(statistics.fmean(losses), made)
    return earliest, found


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

    The first model has tables for two ranks and for more, each for slow links, too; the others share one.
    """
    parts: dict[tuple[str, bool, bool], dict[str, Any]] = {}
    for cell in CELLS:
        if cell.name in cells:
            model = cell.model if cell.model == CELLS[0].model else ""
            key = (model, cell.world_size > 2, cell.rate in SLOW)
            parts.setdefault(key, {})[cell.name] = cells[cell.name]
    return "\n\n".join(map(_overview, parts.values()))


def _overview(cells: dict[str, Any], names: Sequence[str] = SHOWN) -> str:
    sides = [cell["sides"] for cell in cells.values()]
    shown = [
        name
        for name in [COMPUTE, *names]
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


def losses(learnt: dict[str, Any]) -> str:
    """Return the losses after equal steps: of the first model with each seed, of the other one their mean."""
    first, other = ({} if model not in learnt else complete(learnt[model]) for model in SHOWN_LOSSES)
    names = [name for name in ALL if name in {*first, *other} and not name.endswith(OVERLAP)]  # the same bits
    rows = [[LABEL[name], *_of_seeds(first, name), _mean_difference(other, name)] for name in names]
    one, another = map(place_of, SHOWN_LOSSES)
    minus = "minus plain DDP's"
    return table(["training loss", f"{one}", f"{minus} [of each seed]", f"{another}: {minus}"], rows)


def _of_seeds(curves: dict[str, list[Curve]], name: str) -> tuple[str, str]:
    if name not in curves:
        return "-", "-"
    mean = f"{statistics.fmean(_ends(curves[name])):.3f}"
    if name == PLAIN or PLAIN not in curves:
        return mean, ""
    differences = _differences(curves, name)
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    return mean, f"{statistics.fmean(differences):+.4f} [{each}]"


def _mean_difference(curves: dict[str, list[Curve]], name: str) -> str:
    if name not in curves or PLAIN not in curves:
        return "-"
    if name == PLAIN:
        return f"its own: {statistics.fmean(_ends(curves[name])):.3f}"
    return f"{statistics.fmean(_differences(curves, name)):+.4f}"


def _differences(curves: dict[str, list[Curve]], name: str) -> list[float]:
    return [mine - plain for mine, plain in zip(_ends(curves[name]), _ends(curves[PLAIN]), strict=True)]


def _ends(curves: list[Curve]) -> list[float]:
    return [curve["losses"][-1] for curve in curves]


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    head, *lines = (f"| {' | '.join(line)} |" for line in [heads, *rows])
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])
