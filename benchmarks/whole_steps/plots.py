"""The loss of few sides over time: what shorter steps are good for."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, VERMILION, name_ends, save, subplots
from whole_steps.losses import LABEL, THIN
from whole_steps.sides import label
from whole_steps.tables import DETAILED

SHOWN = {"plain": GRAY, "fp16": VERMILION, "8bits": BLUE}
"""Few enough to be told apart."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the losses of the first main cell, if there are any, and write the picture."""
    (cell, *_) = DETAILED
    entry = results.get("losses", {}).get(cell.split(",")[0])
    sides = results.get("cells", {}).get(cell, {}).get("sides", {})
    if entry is None or not sides:
        return
    title = (
        f"Training loss against time, mean of {entry['seeds']} seeds: {cell}, emulated. "
        "The losses after each step are of two ranks on loopback, the times of steps of these hosts."
    )
    figure, (axis,) = subplots([2.6], title)
    ends = {}
    for name, color in SHOWN.items():
        curves = entry["curves"][name]
        seconds = [(index + 0.5) * THIN * sides[name]["median_ms"] / 1e3 for index in range(len(curves[0]))]
        means = [statistics.fmean(point) for point in zip(*curves, strict=True)]
        axis.plot(seconds, means, color=color, linewidth=1.2)
        axis.plot(seconds[-1], means[-1], "o", color=color, markersize=4)
        ends[f"{_short(name)}:\n{seconds[-1]:.0f} s"] = (seconds[-1], means[-1], color)
    axis.set(xlabel="seconds of training", ylabel="training loss")
    name_ends(axis, ends, gap=0.16)
    save(figure, path)


def _short(name: str) -> str:
    return (LABEL.get(name) or label(name)).replace("`", "").replace("_compress_hook", "")
