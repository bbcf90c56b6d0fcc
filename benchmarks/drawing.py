"""What all pictures share: a phone's width, colors for the color-blind, bars, names where lines end."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRAY, BLUE, VERMILION, GREEN, PURPLE = "#767676", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""From Okabe and Ito's palette. Ours is blue, references are gray."""

WIDTH = 4.4
"""Inches, of every picture: on a phone that shows it 350 pixels wide, "small" letters have 9 pixels."""


def subplots(heights: Sequence[float], title: str) -> tuple[Any, list[Any]]:
    """Return a figure with a title, and axes below each other, without frames above and to the right.

    Args:
        heights: Of each of the axes, in inches.
        title: Of the figure. Long ones are broken.
    """
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    mpl.rcParams |= {f"{what}.labelsize": "small" for what in ("axes", "xtick", "ytick")}
    lines = textwrap.wrap(title, 46)
    figure, axes = plt.subplots(
        len(heights),
        figsize=(WIDTH, sum(heights) + 0.25 + 0.2 * len(lines)),
        height_ratios=heights,
        layout="constrained",
        squeeze=False,
    )
    figure.get_layout_engine().set(h_pad=0.07)
    figure.suptitle("\n".join(lines), x=0.02, ha="left", fontsize="medium", fontweight="bold")
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def save(figure: Any, path: Path) -> None:
    """Write a picture, and close it."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure.savefig(path, dpi=160)
    plt.close(figure)


def name_ends(axis: Any, ends: dict[str, tuple[float, float, str]], gap: float = 0.07) -> None:
    """Write names to the right of the ends of lines, without overlap.

    Args:
        axis: The axis of the lines, with its final limits.
        ends: The last point of each line and its color: ``{name: (x, y, color)}``.
        gap: The minimum distance between two names, as a share of the height.
    """
    figure = axis.get_figure()
    figure.canvas.draw()  # the layout decides where the axes are
    to_axes = axis.transAxes.inverted().transform
    heights = {name: float(to_axes(axis.transData.transform((x, y)))[1]) for name, (x, y, _) in ends.items()}
    lowest = -1.0
    for name in sorted(heights, key=lambda name: heights[name]):
        lowest = max(heights[name], lowest + gap)
        axis.annotate(
            name,
            ends[name][:2],
            xytext=(1.02, lowest),
            textcoords=axis.transAxes,
            color=ends[name][2],
            va="center",
            fontsize="small",
            annotation_clip=False,
        )


Bar = tuple[float, list[float]]
"""A median and its range."""


def bars_of(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Bar]:
    """Return the bars of stored entries with a median and quartiles in ms."""
    return {name: (entry["median_ms"], entry["quartiles_ms"]) for name, entry in table.items()}


def number(value: float) -> str:
    """Return three significant digits, or all digits before the decimal point."""
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def draw_bars(
    panels: Mapping[str, Mapping[str, Bar]], unit: str, path: Path, *, title: str, ranges: str = "quartiles"
) -> None:
    """Draw a panel of horizontal bars for each title, with their ranges, and write the picture.

    Each bar has its number, so that there is no axis for it. The picture's title says the unit and what the
    ranges are. Without a panel there is no picture.
    """
    if not panels:
        return
    heights = [0.35 + 0.24 * len(bars) for bars in panels.values()]
    scales = "each panel has its own scale; " if len(panels) > 1 else ""
    figure, axes = subplots(heights, f"{title}, {unit} ({scales}thin lines: {ranges})")
    for axis, (subject, bars) in zip(axes, panels.items(), strict=True):
        longest = max(high for _, (_, high) in bars.values())
        for place, (name, (median, (low, high))) in enumerate(bars.items()):
            spread = [[max(0, median - low)], [max(0, high - median)]]
            color = BLUE if name.startswith("ours") else GRAY
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
