"""One picture with one message: the gain of 8 bits in a whole training step, by model and network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, save, subplots
from whole_steps.tables import README_CELLS

SIDE = "8bits"
MODELS = {
    "7M": "transformer, 7 million parameters",
    "60M": "transformer, 57 million parameters",
    "MLP": "wide perceptron",
    "conv": "convolutional network",
}


def draw_gains(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for every cell of the README with 8 bits, the largest gain first."""
    gains = {
        name: cell["sides"][SIDE]["faster_than_plain"]
        for name, cell in results["cells"].items()
        if name in README_CELLS and SIDE in cell["sides"]
    }
    if not gains:
        return
    names = sorted(gains, key=lambda name: -gains[name]["median"])
    title = (
        "Training steps with 8 bits: how many times as fast as with plain DDP (CPUs, Gloo, emulated hosts)"
    )
    figure, (axis,) = subplots([0.2 + 0.4 * len(names)], title)
    for place, name in enumerate(names):
        middle, (low, high) = gains[name]["median"], gains[name]["quartiles"]
        spread = [[middle - low], [high - middle]]
        axis.barh(place, middle, 0.4, color=BLUE, xerr=spread, ecolor="0.5")
        axis.plot([1, 1], [place - 0.2, place + 0.2], color="0.3", linewidth=1)
        axis.text(max(high, 1) + 0.05, place, f"{middle:.2f}x", va="center", fontsize="small")
        axis.text(0, place - 0.23, _description(name), va="bottom", fontsize="small")
    axis.set_yticks([])
    axis.set_ylim(len(names) - 0.6, -0.9)
    axis.set_xlim(0, 1.12 * max(high for gain in gains.values() for high in gain["quartiles"]))
    axis.set_xticks([1], ["1x: nothing is gained"])
    axis.spines["bottom"].set_visible(False)
    save(figure, path)


def _description(cell: str) -> str:
    model, where = cell.split(", ", maxsplit=1)
    return f"{MODELS[model]}; {where}"
