"""One picture with one message: the gain of 8 bits in a whole training step, by model and network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, save, subplots

SIDE = "8bits"
MODELS = {
    "7M": "transformer, 7 million parameters",
    "60M": "transformer, 57 million parameters",
    "MLP": "wide perceptron",
    "conv": "convolutional network",
}


def draw_gains(results: dict[str, Any], path: Path) -> None:
    """Draw a bar for every cell with 8 bits, the largest gain first."""
    gains = {
        name: cell["sides"][SIDE]["faster_than_plain"]
        for name, cell in results["cells"].items()
        if SIDE in cell["sides"]
    }
    names = sorted(gains, key=lambda name: -gains[name]["median"])
    figure, ((axis,),) = subplots(1, 1, (8.5, 0.6 + 0.36 * len(names)))
    for place, name in enumerate(names):
        middle, (low, high) = gains[name]["median"], gains[name]["quartiles"]
        axis.barh(place, middle, color=BLUE, xerr=[[middle - low], [high - middle]], ecolor="0.5")
        axis.text(high + 0.05, place, f"{middle:.2f}x", va="center")
    axis.axvline(1, color="0.3", linestyle=":")
    axis.set_yticks(range(len(names)), [_told(name) for name in names])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.12 * max(high for gain in gains.values() for high in gain["quartiles"]))
    axis.tick_params(axis="y", length=0)
    figure.suptitle("Emulated hosts: how many times faster 8 bits make a training step than plain DDP")
    save(figure, path)


def _told(cell: str) -> str:
    model, where = cell.split(", ", maxsplit=1)
    return f"{MODELS[model]}; {where}"
