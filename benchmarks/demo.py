"""Train a small transformer on two emulated hosts, with every way to average gradients, and compare them.

    python benchmarks/demo.py                     # 1 Gbit/s between the hosts; also: nox -s demo
    python benchmarks/demo.py --rate 100mbit      # slower links

Needs no root where the system lets ordinary users make network namespaces. Where that is not possible, the
two processes talk over loopback, and the output says so. The training text is the standard library's
sources.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drawing import BLUE, GRAY, GREEN, PURPLE, VERMILION, name_ends, save, subplots
from emulated_hosts import EmulationUnavailableError, address, emulated_hosts, require_rate
from rank_processes import run_rank_processes

TRAINING = str(Path(__file__).with_name("demo_training.py"))
COLORS = {
    "plain DDP": GRAY,
    "16 bits": VERMILION,
    "8 bits": BLUE,
    "low rank": GREEN,
    "PowerSGD, rank 1": PURPLE,
}
SMOOTHED = 10
"""Steps averaged in each point of the plot."""


def train(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return where the ranks ran, and their results."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seen.json"
        command = [TRAINING, str(file), f"--steps={options.steps}", f"--seconds={options.seconds}"]
        try:
            with emulated_hosts(2, rate=options.rate) as hosts:
                where = f"two emulated hosts, links of {options.rate}"
                print(f"Training on {where}.", flush=True)
                interface = {"GLOO_SOCKET_IFNAME": "eth0"}
                run_rank_processes(command, hosts, {"MASTER_ADDR": address(0), **interface})
        except EmulationUnavailableError as error:
            where = "loopback"
            print(
                f"Training on loopback, where little is gained, for want of emulated hosts: {error}",
                flush=True,
            )
            interface = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
            run_rank_processes(command, [[], []], {"MASTER_ADDR": "127.0.0.1", **interface})
        return where, json.loads(file.read_text())


def show_table(seen: dict[str, Any]) -> None:
    """Print the costs and savings of each variant, and the code for it."""
    ways: dict[str, Any] = seen["ways"]
    compute, plain = (statistics.median(ways[name]["seconds"]) for name in ("no communication", "plain DDP"))
    columns = ("ms a step [quartiles]", "exposed ms", "speed", "MB sent a step", "loss")
    print(" " * 16 + "{:>24}{:>12}{:>9}{:>16}{:>8}".format(*columns))
    for name, way in ways.items():
        low, step, high = statistics.quantiles(way["seconds"], n=4, method="inclusive")
        time = f"{1e3 * step:.0f} [{1e3 * low:.0f}, {1e3 * high:.0f}]"
        if name == "no communication":
            print(f"{name:<16}{time:>24}")
            continue
        sent = statistics.median(way["bytes"])
        print(
            f"{name:<16}{time:>24}{1e3 * (step - compute):>12.0f}{plain / step:>8.2f}x"
            f"{f'{sent / 1e6:.2f}' if sent else 'not counted':>16}{way['held_out_loss']:>8.3f}"
        )
    print("\nExposed is what communication adds to a step; loss is of text that was not trained on.")
    print("What makes it so:")
    for name, way in ways.items():
        print(f"  {name:<18}" + way["code"].replace("\n", "\n" + " " * 20))


def draw(title: str, seen: dict[str, Any], path: Path) -> None:
    """Draw the loss over time, with the median time for every step, so that interruptions do not count."""
    figure, (axis,) = subplots([3.0], title)
    ends = {}
    for name, color in COLORS.items():
        way = seen["ways"][name]
        losses = smooth(way["losses"])
        times = [count * statistics.median(way["seconds"]) for count in range(1, len(losses) + 1)]
        axis.plot(times, losses, color=color, linewidth=1.2)
        axis.plot(times[-1], losses[-1], "o", color=color, markersize=4)
        ends[f"{name}:\n{times[-1]:.1f} s"] = (times[-1], losses[-1], color)
    axis.set(xlabel="seconds of training, at the median step", ylabel="training loss")
    name_ends(axis, ends, gap=0.15)
    path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
    print(f"\nloss over time: {path.resolve()}")


def smooth(values: Sequence[float]) -> list[float]:
    """Return the running means of the values."""
    return [statistics.fmean(values[max(0, end - SMOOTHED) : end]) for end in range(1, len(values) + 1)]


def main() -> None:
    """Train, and show the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="rate of the links, for example 200mbit")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seconds", type=float, default=45, help="after which no further step begins")
    parser.add_argument("--plot", type=Path, default=Path("build/demo.png"))
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    try:
        require_rate(options.rate)
    except ValueError as error:
        parser.error(f"--{error}")
    try:
        where, seen = train(options)
    except KeyboardInterrupt:
        sys.exit("stopped")
    steps = len(seen["ways"]["plain DDP"]["seconds"])
    title = f"{seen['parameters'] / 1e6:.1f} million parameters, {steps} steps, {where}"
    print(f"\n{title}")
    show_table(seen)
    draw(title, seen, options.plot)


if __name__ == "__main__":
    main()
