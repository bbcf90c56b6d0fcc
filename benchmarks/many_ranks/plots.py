"""The predicted curves: seconds over the number of ranks, one panel per rate of the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, VERMILION, name_ends, save, subplots
from many_ranks.predicting import wire_limit

COLORS = (GRAY, VERMILION, BLUE)
RATES = (1, 25, 400)
"""The rates shown, in Gbit/s. The curves of the others lie between these; see the result file."""


def draw(predictions: dict[str, Any], path: Path) -> None:
    """Draw the curve of every side and the wire's limit, and write the picture."""
    rows = predictions["curve"]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    figure, (axes,) = subplots(1, len(RATES), (4.2 * len(RATES), 3.6))
    for axis, gbit in zip(axes, RATES, strict=True):
        ends = {}
        for side, color in zip(sides, COLORS, strict=True):
            own = [row for row in rows if row["side"] == side and row["gbit"] == gbit]
            times = [1e3 * row["predicted_seconds"] for row in own]
            axis.plot([row["world"] for row in own], times, marker=".", color=color)
            ends[side] = (own[-1]["world"], times[-1], color)
        worlds = sorted({row["world"] for row in rows})
        limits = [1e3 * wire_limit(world, 1, gbit) for world in worlds]
        axis.plot(worlds, limits, color="black", linestyle=":")
        ends["limit of the links"] = (worlds[-1], limits[-1], "black")
        axis.set(xscale="log", yscale="log", xlabel="ranks, one a node")
        axis.set_title(f"{gbit:g} Gbit/s", loc="left", fontsize="medium")
        if axis is axes[-1]:
            last = ends
    axes[0].set_ylabel("predicted ms for 25 MiB")
    figure.suptitle("Predicted, not measured: recorded schedules, played with the fitted cost model")
    name_ends(axes[-1], last)
    save(figure, path)
