"""What all pictures share: a phone's width, colors for the color-blind, names where lines end."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
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
