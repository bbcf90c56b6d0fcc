"""The loss of few sides over time, by curves and the times of steps: what shorter steps are good for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, GREEN, PURPLE, VERMILION, name_ends, save, subplots
from training import mean_curve
from whole_steps.losses import LEARNT, THIN, complete, curve_of, place_of, seconds_of_steps
from whole_steps.sides import PLAIN, SHORT_LABELS

COLORS = {PLAIN: GRAY, "fp16": VERMILION, "powersgd-one": GREEN, "8bits": BLUE, "low-rank-one": PURPLE}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the losses of the first model, if there are any, and write the picture."""
    (model, *_) = LEARNT
    entry = results.get("losses", {}).get(model, {"curves": {}})
    curves = complete(entry)
    sides = results.get("cells", {}).get(place_of(model), {"sides": {}})["sides"]
    if not (COLORS.keys() <= sides.keys() and {curve_of(name) for name in COLORS} <= curves.keys()):
        return
    title = (
        f"Training loss against time: {place_of(model)} (CPUs, Gloo, emulated). "
        f"Lines are means of {entry['seeds']} seeds."
    )
    figure, (axis,) = subplots([2.6], title)
    ends = {}
    for name, color in COLORS.items():
        seconds = seconds_of_steps(name, sides, entry["steps"])[THIN - 1 :: THIN]
        losses = mean_curve([curve["losses"] for curve in curves[curve_of(name)]])
        axis.plot(seconds, losses, color=color, linewidth=1.2)
        axis.plot(seconds[-1], losses[-1], "o", color=color, markersize=4)
        ends[f"{SHORT_LABELS[name]}:\n{seconds[-1]:.0f} s"] = (seconds[-1], losses[-1], color)
    axis.set(xlabel="seconds of training", ylabel="training loss")
    name_ends(axis, ends, gap=0.15)
    save(figure, path)
