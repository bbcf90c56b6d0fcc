"""The predicted curves: seconds over the number of ranks, a panel for each rate of the links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from many_ranks.predicting import wire_limit

COLORS = ("dimgray", "tab:blue", "tab:red", "tab:green")


def draw(predictions: dict[str, Any], path: Path) -> None:
    """Draw the curve of every side, with the wire's limit, and write the picture."""
    import matplotlib as mpl  # noqa: PLC0415 - ranks need no plots

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    rows = predictions["curve"]
    rates = sorted({row["gbit"] for row in rows})
    sides = list(dict.fromkeys(row["side"] for row in rows))
    figure, axes = plt.subplots(
        1, len(rates), figsize=(3.4 * len(rates), 3.8), layout="constrained", squeeze=False
    )
    for axis, gbit in zip(axes[0], rates, strict=True):
        for side, color in zip(sides, COLORS, strict=False):
            own = [row for row in rows if row["side"] == side and row["gbit"] == gbit]
            axis.plot(
                [row["world"] for row in own],
                [1e3 * row["predicted_seconds"] for row in own],
                marker=".",
                color=color,
                label=side,
            )
        worlds = sorted({row["world"] for row in rows})
        limits = [1e3 * wire_limit(world, 1, gbit) for world in worlds]
        axis.plot(worlds, limits, color="black", linestyle=":", label="wire, a byte a value")
        axis.set(xscale="log", yscale="log", title=f"{gbit:g} Gbit/s", xlabel="ranks, one a node")
    axes[0][0].set_ylabel("predicted ms for 25 MiB")
    axes[0][0].legend(fontsize="x-small")
    figure.suptitle("Predicted, not measured: recorded schedules, played with the fitted cost model")
    figure.savefig(path, dpi=110)
    plt.close(figure)
