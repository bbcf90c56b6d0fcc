"""Bar charts of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, save, subplots

Bar = tuple[float, list[float]]
"""A median and its quartiles."""

OURS = ("ours", "8 bits, ours")


def bars_of(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Bar]:
    """Return the bars of stored entries with a median and quartiles in ms."""
    return {name: (entry["median_ms"], entry["quartiles_ms"]) for name, entry in table.items()}


def number(value: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def draw_bars(panels: Mapping[str, Mapping[str, Bar]], unit: str, path: Path, *, title: str) -> None:
    """Draw a panel of horizontal bars for each title, with the quartiles, and write the picture.

    Each bar has its number, so that there is no axis for it. The unit is a part of the picture's title.
    """
    figure, axes = subplots([0.35 + 0.24 * len(bars) for bars in panels.values()], f"{title}, {unit}")
    for axis, (subject, bars) in zip(axes, panels.items(), strict=True):
        longest = max(high for _, (_, high) in bars.values())
        for place, (name, (median, (low, high))) in enumerate(bars.items()):
            spread = [[max(0, median - low)], [max(0, high - median)]]
            color = BLUE if name.startswith(OURS) else GRAY
            axis.barh(place, median, xerr=spread, color=color, ecolor="0.3")
            axis.text(
                max(median, high) + 0.02 * longest, place, number(median), va="center", fontsize="small"
            )
        axis.set_xlim(0, 1.2 * longest)
        axis.set_title(subject, fontsize="small", loc="left")
        axis.set_xticks([])
        axis.spines["bottom"].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.set_yticks(range(len(bars)), bars)
        axis.set_ylim(len(bars) - 0.4, -0.6)
    save(figure, path)
