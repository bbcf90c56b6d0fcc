"""Two pictures in one: a step of the main cells in bars, and the loss of few sides over time."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from whole_steps.losses import LABEL, THIN
from whole_steps.sides import COMPUTE, OVERLAP, label
from whole_steps.tables import MAIN

SHOWN = {
    "plain": "dimgray",
    "fp16": "tab:orange",
    "bf16": "tab:green",
    "8bits": "tab:blue",
    "8bits" + OVERLAP: "tab:red",
}
"""Few enough to be told apart."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw what there is of the main cells, and write the picture."""
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    cells = {name: results["cells"][name] for name in MAIN if name in results.get("cells", {})}
    if not cells:
        return
    title, cell = next(iter(cells.items()))
    entry = results.get("losses", {}).get(title.split(",")[0])
    panels = len(cells) + (entry is not None)
    size = (4.5 * panels, 3.2)
    figure, (axes,) = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for axis, (name, shown) in zip(axes, cells.items(), strict=False):
        _bars(axis, name, shown["sides"])
    if entry is not None:
        _curves(axes[-1], title, entry, cell["sides"])
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, title: str, sides: dict[str, Any]) -> None:
    shown = [name for name in SHOWN if "median_ms" in sides.get(name, {})]
    for place, name in enumerate(shown):
        side = sides[name]
        low, high = side["quartiles_ms"]
        middle = side["median_ms"]
        axis.barh(place, middle, xerr=[[max(0, middle - low)], [max(0, high - middle)]], color=SHOWN[name])
        text = f" {middle:.0f} ms, {side['faster_than_plain']['median']:.2f}x"
        axis.text(max(middle, high), place, text, va="center", fontsize="small")
    if COMPUTE in sides:
        axis.axvline(sides[COMPUTE]["median_ms"], color="black", linestyle=":", linewidth=1)
    axis.set_yticks(range(len(shown)), [_short(name) for name in shown])
    axis.invert_yaxis()
    axis.margins(x=0.4)
    axis.set_xlim(left=0)
    axis.set(title=title, xlabel="ms for a step; dotted: computation alone")


def _curves(axis: Any, title: str, entry: dict[str, Any], sides: dict[str, Any]) -> None:
    for name, color in SHOWN.items():
        curves = entry["curves"].get(name.removesuffix(OVERLAP))
        if name.endswith(OVERLAP) or not isinstance(curves, list) or "median_ms" not in sides.get(name, {}):
            continue  # with the overlap: another line as good as on the same
        seconds = [(index + 0.5) * THIN * sides[name]["median_ms"] / 1e3 for index in range(len(curves[0]))]
        means = [statistics.fmean(point) for point in zip(*curves, strict=True)]
        axis.plot(seconds, means, color=color, linewidth=1)
        # Slanted: lines end at different times, but at nearly the same loss.
        end = (seconds[-1], means[-1])
        axis.annotate(f" {_short(name)}", end, color=color, fontsize="small", rotation=50, va="bottom")
    axis.margins(x=0.15)
    axis.set(title=f"{title}: training loss", xlabel="s", ylabel=f"mean of {entry['seeds']} seeds")
    axis.grid(color="0.9")


def _short(name: str) -> str:
    return (LABEL.get(name) or label(name)).replace("`", "").replace("_compress_hook", "")
