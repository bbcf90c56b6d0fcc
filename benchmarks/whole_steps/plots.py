"""Two pictures in one: step times of the main cells as bars, and the loss of a few sides over time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, GREEN, VERMILION, name_ends, save, subplots
from whole_steps.losses import LABEL, THIN
from whole_steps.sides import COMPUTE, OVERLAP, label
from whole_steps.tables import MAIN

SHOWN = {
    "plain": GRAY,
    "fp16": VERMILION,
    "bf16": GREEN,
    "8bits": BLUE,
    "8bits" + OVERLAP: BLUE,
}
"""Few enough to be told apart."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the measured main cells, and write the picture."""
    cells = {name: results["cells"][name] for name in MAIN if name in results.get("cells", {})}
    if not cells:
        return
    title, cell = next(iter(cells.items()))
    entry = results.get("losses", {}).get(title.split(",")[0])
    panels = len(cells) + (entry is not None)
    columns = min(2, panels)
    rows = -(-panels // columns)
    figure, axes = subplots(rows, columns, (5.5 * columns, 2.9 * rows))
    for axis in axes.flat[panels:]:
        axis.remove()
    for axis, (name, shown) in zip(axes.flat, cells.items(), strict=False):
        _bars(axis, name, shown["sides"])
    if entry is not None:
        _curves(axes.flat[panels - 1], title, entry, cell["sides"])
    figure.suptitle("Emulated hosts: a training step, and the loss it reaches in time")
    save(figure, path)


def _bars(axis: Any, title: str, sides: dict[str, Any]) -> None:
    shown = [name for name in SHOWN if "median_ms" in sides.get(name, {})]
    for place, name in enumerate(shown):
        side = sides[name]
        low, high = side["quartiles_ms"]
        middle = side["median_ms"]
        spread = [[max(0, middle - low)], [max(0, high - middle)]]
        axis.barh(place, middle, xerr=spread, color=SHOWN[name], ecolor="0.3")
        text = f" {middle:.0f} ms, {side['faster_than_plain']['median']:.2f}x"
        axis.text(max(middle, high), place, text, va="center", fontsize="small")
    if COMPUTE in sides:
        axis.axvline(sides[COMPUTE]["median_ms"], color="black", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(shown)), [_short(name) for name in shown])
    axis.invert_yaxis()
    axis.margins(x=0.4)
    axis.set_xlim(left=0)
    axis.tick_params(axis="y", length=0)
    axis.set(xlabel="ms for a step; dotted: computation alone")
    axis.set_title(title, loc="left", fontsize="medium")


def _curves(axis: Any, title: str, entry: dict[str, Any], sides: dict[str, Any]) -> None:
    ends = {}
    for name, color in SHOWN.items():
        curves = entry["curves"].get(name.removesuffix(OVERLAP))
        if name.endswith(OVERLAP) or not isinstance(curves, list) or "median_ms" not in sides.get(name, {}):
            continue  # the line would nearly coincide with the overlapped one
        seconds = [(index + 0.5) * THIN * sides[name]["median_ms"] / 1e3 for index in range(len(curves[0]))]
        means = [statistics.fmean(point) for point in zip(*curves, strict=True)]
        axis.plot(seconds, means, color=color, linewidth=1.2)
        axis.plot(seconds[-1], means[-1], "o", color=color, markersize=4)
        ends[f"{_short(name)}: {seconds[-1]:.0f} s"] = (seconds[-1], means[-1], color)
    axis.set(xlabel="s", ylabel=f"training loss, mean of {entry['seeds']} seeds")
    axis.set_title(title, loc="left", fontsize="medium")
    name_ends(axis, ends, gap=0.1)


def _short(name: str) -> str:
    return (LABEL.get(name) or label(name)).replace("`", "").replace("_compress_hook", "")
