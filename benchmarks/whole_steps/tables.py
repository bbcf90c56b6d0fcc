"""The results as Markdown, for documents."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from whole_steps.cells import FIRST
from whole_steps.losses import LABEL, losses_in_time
from whole_steps.sides import ALL, COMPUTE, OURS, OVERLAP, PLAIN, label

GAIN = 1.03
"""Less than 3 % is within the machine's noise."""
MAIN = tuple(cell.name for cell in FIRST[:3])
"""The cells whose figures are all shown in a table."""


def tables(results: dict[str, Any]) -> str:
    """Return all tables."""
    cells = results.get("cells", {})
    parts = [heading(cells)] if cells else []
    for model in dict.fromkeys(map(_model, cells)):
        of_model = {name: cell for name, cell in cells.items() if _model(name) == model}
        parts += [overview(of_model)]
    parts += [remarks(cells)] if cells else []
    parts += [details(name, cells[name]) for name in MAIN if name in cells]
    parts += [losses(model, entry, cells) for model, entry in results.get("losses", {}).items()]
    return "\n\n".join(parts)


def _model(cell: str) -> str:
    return cell.split(",", maxsplit=1)[0]


def heading(cells: dict[str, Any]) -> str:
    """Describe where and when the cells were measured; several trees or machines are named as such."""
    runs = [side["run"] for cell in cells.values() for side in cell["sides"].values() if "run" in side]
    said = {
        f"torch {run['versions']['torch']}, {run['machine']['cores']} cores ({run['machine']['cpu']}), "
        f"tree {run['tree']}, {run['date']}"
        for run in runs
    }
    several = "Several runs: " if len(said) > 1 else ""
    what = "ms for a training step; in brackets: how many times faster than plain DDP in the same turn. "
    return what + several + "; ".join(sorted(said))


def overview(cells: dict[str, Any]) -> str:
    """Return a model's table: sides down, cells across."""
    shown = [name for name in [COMPUTE, *ALL] if any(name in cell["sides"] for cell in cells.values())]
    (model,) = set(map(_model, cells))
    heads = [name.split(", ", 1)[1] for name in cells]
    rows = [[label(name), *(_time(cell["sides"].get(name)) for cell in cells.values())] for name in shown]
    parameters = next((cell["parameters"] for cell in cells.values() if "parameters" in cell), 0)
    where = "emulated hosts" + (" and loopback" if any("loopback" in head for head in heads) else "")
    return table([f"{model}, {parameters / 1e6:.1f} million parameters: ms on {where}", *heads], rows)


def _time(side: dict[str, Any] | None) -> str:
    if side is None:
        return "-"
    if "failed" in side:
        return "fails"
    faster = side.get("faster_than_plain")
    return f"{side['median_ms']:.0f}" + (f" ({faster['median']:.2f}x)" if faster else "")


def remarks(cells: dict[str, Any]) -> str:
    """Say where nothing is gained, what ``auto`` chose, and what failed."""
    return "\n".join(f"- {line}" for line in [*_gains(cells), *_choices(cells), *_failures(cells)])


def _gains(cells: dict[str, Any]) -> Iterator[str]:
    none = []
    for name, cell in cells.items():
        gains = [
            side["faster_than_plain"]["median"]
            for key, side in cell["sides"].items()
            if key.removesuffix(OVERLAP) in OURS and "faster_than_plain" in side
        ]
        if gains and max(gains) < GAIN:
            none.append(f"{name} (at best {max(gains):.2f}x)")
    if none:
        yield f"Nothing is gained here: {'; '.join(none)}."


def _choices(cells: dict[str, Any]) -> Iterator[str]:
    for name, cell in cells.items():
        side = cell["sides"].get("auto", {})
        if "chosen" in side:
            chosen = side["chosen"]
            yield (
                f"`auto` in {name}: {chosen['candidate']} after {chosen['steps']} steps, "
                f"{side['of_best']['median']:.3f} of the time of {label(side['best_candidate'])}."
            )


def _failures(cells: dict[str, Any]) -> Iterator[str]:
    failed: dict[tuple[str, str], list[str]] = {}
    for name, cell in cells.items():
        for key, side in cell["sides"].items():
            if "failed" in side:
                failed.setdefault((key, side["failed"]), []).append(name)
    for (key, error), names in failed.items():
        yield f"{label(key)} fails ({error}): {'; '.join(names)}."


def details(title: str, cell: dict[str, Any]) -> str:
    """Return all figures of one cell."""
    rows = []
    for name in [COMPUTE, *ALL]:
        side = cell["sides"].get(name)
        if side is None or "failed" in side:
            continue
        row = [label(name), f"{side['median_ms']:.0f}", _range(side["quartiles_ms"])]
        if name == COMPUTE:
            rows.append([*row, "", "", "", "", ""])
            continue
        exposed = side["exposed"]
        rows.append(
            [
                *row,
                f"{side['faster_than_plain']['median']:.2f}x",
                f"{exposed['median_ms']:.0f} {_range(exposed['quartiles_ms'])}",
                f"{side['last_bucket_ms']:.1f}",
                f"{side.get('mib_on_wire', side['mib_sent']):.2f}",
                f"{side['fraction_of_possible']:.2f}",
            ]
        )
    heads = [
        f"{title}, emulated",
        "ms",
        "quartiles",
        "faster",
        "exposed, ms",
        "last bucket, ms",
        "MiB sent by a host",
        "of the possible",
    ]
    return table(heads, rows)


def losses(model: str, entry: dict[str, Any], cells: dict[str, Any]) -> str:
    """Return the losses after equal steps, and after equal time if steps of that model were timed."""
    curves = {name: curve for name, curve in entry["curves"].items() if isinstance(curve, list)}
    timed = {
        name: losses_in_time(entry, cell)
        for name, cell in cells.items()
        if name in MAIN and _model(name) == model and PLAIN in cell["sides"]
    }
    times = ", times on emulated hosts" if timed else ""
    heads = [
        f"{model}: training loss{times}",
        f"after {entry['steps']} steps",
        "minus plain DDP's [of each seed]",
    ]
    heads += [f"after {seconds:.0f} s, {name.split(', ', 1)[1]}" for name, (seconds, _) in timed.items()]
    rows = []
    for name in dict.fromkeys([*curves, *(name for _, found in timed.values() for name in found)]):
        own = curves[name.removesuffix(OVERLAP)]
        text = LABEL.get(name) or label(name)
        row = (
            [text, "the same bits", ""] if name.endswith(OVERLAP) else [text, *_final(own, curves.get(PLAIN))]
        )
        for _, found in timed.values():
            row.append(f"{statistics.fmean(found[name]):.3f}" if name in found else "-")
        rows.append(row)
    return table(heads, rows)


def _final(own: list[list[float]], plain: list[list[float]] | None) -> tuple[str, str]:
    mean = f"{statistics.fmean(curve[-1] for curve in own):.3f}"
    if plain is None or own is plain:
        return mean, ""
    differences = [mine[-1] - its[-1] for mine, its in zip(own, plain, strict=True)]
    each = ", ".join(f"{difference:+.4f}" for difference in differences)
    return mean, f"{statistics.fmean(differences):+.4f} [{each}]"


def _range(quartiles: list[float]) -> str:
    return f"[{quartiles[0]:.0f}, {quartiles[1]:.0f}]"


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
