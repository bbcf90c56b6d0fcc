"""FSDP2 with averages in few bits between nodes against native HSDP: forward and backward on slow links.

    python benchmarks/bench_fsdp.py --repeats 15

Two emulated hosts with two ranks each; 8.4 million parameters in 8 layers, each with ``fully_shard``. Times
are of the slowest rank, for one forward and backward pass. Writes results/fsdp.json and .png.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from drawing import bars_of, draw_bars
from harness import Benchmark, Found, in_turns, load, print_times, slowest
from rank_processes import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce

LAYERS, WIDTH, BATCH = 8, 1024, 64
NATIVE = "native HSDP, fp32"
SIDES: dict[str, dict[str, Any]] = {
    "ours: fp32, overlapped": {"min_bytes": 1 << 40},
    "ours: 8 bits": {},
    "ours: 8 bits, feedback both": {"error_feedback": "both"},
    "ours: 4 bits": {"bits": 4},
}
RATES = {"1gbit": "1 Gbit/s", "200mbit": "0.2 Gbit/s"}
PLACEMENT = (0, 0, 1, 1)


def model(mesh: DeviceMesh) -> torch.nn.Module:
    """Return the model, sharded layer by layer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def measure(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every pass of every side."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    models = {NATIVE: model(mesh)}
    for name, options in SIDES.items():
        models[name] = model(mesh["shard"])
        quantize_all_reduce(models[name], QuantizedAllreduceState(mesh["node"], **options))
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def both_passes(sharded: torch.nn.Module) -> Callable[[], None]:
        return lambda: sharded(batch).square().mean().backward()

    sides = {name: both_passes(sharded) for name, sharded in models.items()}
    return in_turns(sides, repeats, prepare=lambda name: models[name].zero_grad())


def times_of(rate: str, repeats: int) -> dict[str, Any]:
    """Return the times with one rate of the links."""
    return slowest(on_ranks(measure, 4, repeats, rate=rate, placement=PLACEMENT))


def cases(options: Namespace) -> Iterator[Found]:
    """Measure with each rate of the links."""
    for rate, title in RATES.items():
        times = times_of(rate, options.repeats)
        for entry in times.values():
            entry["times_faster"] = round(times[NATIVE]["median_ms"] / entry["median_ms"], 2)
        print_times(f"2 hosts of 2 ranks, {title}, load {load()}", times, NATIVE)
        yield ("times", rate), times


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times, one panel per rate."""
    panels = {RATES[rate]: bars_of(entries) for rate, entries in results["times"].items()}
    draw_bars(panels, "ms", path, title="Forward and backward with HSDP, two emulated hosts of two ranks")


def main() -> None:
    """Measure, print, store and draw."""
    facts = {
        "hosts": 2,
        "ranks_per_host": 2,
        "parameters": LAYERS * (WIDTH + 1) * WIDTH,
        "batch": BATCH,
        "load_average_before": load(),
    }
    Benchmark(__file__, __doc__, repeats=15).run({"times": cases}, facts=lambda _: facts, draw=draw)


if __name__ == "__main__":
    main()
