"""Bar charts of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Bar = tuple[float, list[float]]
"""A median and its quartiles."""


def draw_bars(panels: Mapping[str, Mapping[str, Bar]], unit: str, path: Path) -> None:
    """Draw one panel of horizontal bars for each title, with the quartiles, and write the picture.

    Three panels in a row at most.
    """
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns, 3 * rows), layout="constrained", squeeze=False
    )
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    for axis, (title, bars) in zip(axes.flat, panels.items(), strict=False):
        for place, (label, (median, (low, high))) in enumerate(bars.items()):
            spread = [[max(0, median - low)], [max(0, high - median)]]
            color = "tab:blue" if label.startswith(("dist_utils", "ours")) else "tab:gray"
            axis.barh(place, median, xerr=spread, color=color)
        axis.set_yticks(range(len(bars)), bars)
        axis.invert_yaxis()
        axis.set(title=title, xlabel=unit)
    figure.savefig(path, dpi=110)
