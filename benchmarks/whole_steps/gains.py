"""One picture with one message: the gains of few sides in a whole training step, by model and network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, GREEN, save, subplots
from whole_steps.sides import SHORT_LABELS

COLORS = {"powersgd-one": GRAY, "8bits": GREEN, "low-rank-one": BLUE}
CELLS = (
    "7M, 2 hosts, 0.01 Gbit/s",
    "7M, 2 hosts, 0.1 Gbit/s",
    "7M, 2 hosts of 2 ranks, 0.2 Gbit/s",
    "60M, 2 hosts, 1 Gbit/s",
    "MLP, 2 hosts, 1 Gbit/s",
    "7M, 2 hosts, 1 Gbit/s",
    "7M, 2 ranks, loopback",
)
MODELS = {
    "7M": "transformer, 7 million",
    "60M": "transformer, 57 million",
    "MLP": "perceptron, 19 million",
}


def draw_gains(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for each side in each cell that has it, on a scale of factors."""
    sides = {name: results["cells"][name]["sides"] for name in CELLS if name in results["cells"]}
    gains = {
        name: {side: of_cell[side]["faster_than_plain"] for side in COLORS if side in of_cell}
        for name, of_cell in sides.items()
    }
    if not any(gains.values()):
        return
    title = "Training steps: how many times as fast as with plain DDP (CPUs, Gloo, emulated hosts)"
    figure, (axis,) = subplots([0.25 + sum(0.3 + 0.17 * len(of_cell) for of_cell in gains.values())], title)
    place = 0.0
    for name, of_cell in gains.items():
        axis.annotate(
            _description(name), (1, place), (3, 0), textcoords="offset points", va="center", fontsize="small"
        )
        place += 1
        for side, gain in of_cell.items():
            middle, (low, high) = gain["median"], gain["quartiles"]
            spread = [[middle - low], [high - middle]]
            color = COLORS[side]
            axis.barh(place, middle - 1, 0.8, left=1, color=color, xerr=spread, ecolor="0.3")
            text = f"{middle:.{1 if middle >= 10 else 2}f}x {SHORT_LABELS[side]}"
            axis.text(1.05 * max(high, 1), place, text, va="center", fontsize="small", color=color)
            place += 1
        place += 0.6
    axis.axvline(1, color="0.3", linewidth=1)
    axis.set_xscale("log")
    axis.set_xlim(0.9, 10 * max(gain["median"] for of_cell in gains.values() for gain in of_cell.values()))
    axis.set_ylim(place - 0.6, -0.8)
    axis.set_yticks([])
    axis.set_xticks([1], ["1x: nothing is gained"])
    axis.minorticks_off()
    axis.spines[["bottom", "left"]].set_visible(False)
    save(figure, path)


def _description(cell: str) -> str:
    model, where = cell.split(", ", maxsplit=1)
    return f"{MODELS[model]}; {where}"
