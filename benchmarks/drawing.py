"""Shared by all pictures: colors for the color-blind, a plain frame, names at the ends of lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

GRAY, BLUE, VERMILION, GREEN, PURPLE = "#767676", "#0072B2", "#D55E00", "#009E73", "#CC79A7"
"""From Okabe and Ito's palette. Ours is blue, references are gray."""


def subplots(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """Return a figure and an array of its axes, without frames above and to the right."""
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False, **options)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a picture, and close it."""
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure.savefig(path, dpi=110)
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
