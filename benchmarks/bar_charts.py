"""Bar charts of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, save, subplots

Bar = tuple[float, list[float]]
"""A median and its quartiles."""

OURS = ("ours", "dist_utils", "8 bits, ours")


def bars_of(table: Mapping[str, Mapping[str, Any]], unit: str = "ms") -> dict[str, Bar]:
    """Return the bars of stored entries with a median and quartiles in ``unit``."""
    return {name: (entry[f"median_{unit}"], entry[f"quartiles_{unit}"]) for name, entry in table.items()}


def number(value: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def draw_bars(
    panels: Mapping[str, Mapping[str, Bar]], unit: str, path: Path, *, title: str, columns: int = 3
) -> None:
    """Draw one panel of horizontal bars per title, with quartiles, and write the picture.

    Each bar shows its number. All panels have the same names from top to bottom, written once on the left; a
    name that a panel lacks has no bar there.
    """
    names = list(dict.fromkeys(name for bars in panels.values() for name in bars))
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    size = (2.4 + max(5, 3.2 * columns), 0.5 + rows * (0.8 + 0.27 * len(names)))
    figure, axes = subplots(rows, columns, size, sharey=True)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (subject, bars) in zip(axes.flat, panels.items(), strict=False):
        longest = max(high for _, (_, high) in bars.values())
        for name, (median, (low, high)) in bars.items():
            spread = [[max(0, median - low)], [max(0, high - median)]]
            color = BLUE if name.startswith(OURS) else GRAY
            place = names.index(name)
            axis.barh(place, median, xerr=spread, color=color, ecolor="0.3")
            axis.text(
                max(median, high) + 0.02 * longest, place, number(median), va="center", fontsize="small"
            )
        axis.set_xlim(0, 1.2 * longest)
        axis.set_title(subject, fontsize="medium", loc="left")
        axis.locator_params(axis="x", nbins=4)
        axis.tick_params(axis="y", length=0)
    for axis in axes[:, 0]:
        axis.set_yticks(range(len(names)), names)
    axes[0, 0].set_ylim(len(names) - 0.4, -0.6)
    figure.suptitle(title)
    figure.supxlabel(unit, fontsize="medium")
    save(figure, path)
