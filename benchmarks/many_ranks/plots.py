"""The predicted curves: milliseconds over the number of ranks, a panel for some rates of the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, VERMILION, name_ends, save, subplots
from many_ranks.predicting import wire_limit

COLORS = (GRAY, VERMILION, BLUE)
RATES = (1, 25)
"""Gbit/s. Curves of the others are in the result file."""


def draw(predictions: dict[str, Any], path: Path) -> None:
    """Draw the curve of every side and the wire's limit, and write the picture."""
    rows = predictions["curve"]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    worlds = sorted({row["world"] for row in rows})
    title = "Predicted, not measured: ms to average 25 MiB, over the number of ranks, one a node"
    figure, axes = subplots([2.3] * len(RATES), title)
    for axis, gbit in zip(axes, RATES, strict=True):
        ends = {}
        for side, color in zip(sides, COLORS, strict=True):
            own = [row for row in rows if row["side"] == side and row["gbit"] == gbit]
            times = [1e3 * row["predicted_seconds"] for row in own]
            axis.plot([row["world"] for row in own], times, marker=".", color=color)
            ends[side.replace(" direct", ",\neach to each")] = (own[-1]["world"], times[-1], color)
        limits = [1e3 * wire_limit(world, 1, gbit) for world in worlds]
        axis.plot(worlds, limits, color="black", linestyle=":")
        ends["limit of the links"] = (worlds[-1], limits[-1], "black")
        axis.set(xscale="log", yscale="log", ylim=(2, 1500))
        for numbers, those in ((axis.xaxis, worlds[::2]), (axis.yaxis, (3, 10, 30, 100, 300, 1000))):
            numbers.set_ticks(those, [f"{number:,}" for number in those])
            numbers.set_ticks([], minor=True)
        axis.set_title(f"{gbit:g} Gbit/s", loc="left", fontsize="small")
        name_ends(axis, ends, gap=0.12)
    save(figure, path)
