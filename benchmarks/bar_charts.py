"""Bar charts of benchmark results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

Bar = tuple[float, list[float]]
"""A median and its quartiles."""


def draw_bars(panels: Mapping[str, Mapping[str, Bar]], unit: str, path: Path) -> None:
    """Draw one panel of horizontal bars for each title, with the quartiles, and write the picture."""
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3), layout="constrained", squeeze=False
    )
    for axis, (title, bars) in zip(axes[0], panels.items(), strict=True):
        for place, (label, (median, (low, high))) in enumerate(bars.items()):
            spread = [[max(0, median - low)], [max(0, high - median)]]
            colour = "tab:blue" if label.startswith(("dist_utils", "ours")) else "tab:gray"
            axis.barh(place, median, xerr=spread, color=colour)
        axis.set_yticks(range(len(bars)), bars)
        axis.invert_yaxis()
        axis.set(title=title, xlabel=unit)
    figure.savefig(path, dpi=110)
