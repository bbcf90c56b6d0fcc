"""FSDP2 with averages in few bits against native FSDP2: forward and backward on slow links.

    python benchmarks/bench_fsdp.py --repeats 15

Two emulated hosts with two ranks each; 8.4 million parameters in 8 layers, each with ``fully_shard``: sharded
inside the hosts and replicated between them (HSDP), or sharded over all ranks. Times are of the slowest rank,
for one forward and backward pass. Bytes are what passes a host's interface in one pass, in the busier
direction, headers and acknowledgments included, for each parameter. Writes results/fsdp.json and .png.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from drawing import bars_of, draw_bars
from harness import Benchmark, Found, bytes_on_link, in_turns, load, print_times, slowest
from rank_processes import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter

LAYERS, WIDTH, BATCH = 8, 1024, 64
PARAMETERS = LAYERS * (WIDTH + 1) * WIDTH
NATIVE = "native HSDP, fp32"
NATIVE_FULL = "native, sharded over all ranks, fp32"
SIDES: dict[str, dict[str, Any]] = {
    "ours: fp32": {"min_bytes": 1 << 40},
    "ours: 8 bits": {},
    "ours: 8 bits, feedback both": {"error_feedback": "both"},
    "ours: 4 bits": {"bits": 4},
}
FULL_SIDES: dict[str, dict[str, Any]] = {
    "ours, sharded over all ranks: 8 bits": {},
    "ours, sharded over all ranks: 4 bits": {"bits": 4},
}
PASSES = 3
"""Passes whose bytes are counted together."""
RATES = {"1gbit": "1 Gbit/s", "200mbit": "0.2 Gbit/s"}
PLACEMENT = (0, 0, 1, 1)


def model(mesh: DeviceMesh) -> torch.nn.Module:
    """Return the model, sharded layer by layer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def models() -> dict[str, torch.nn.Module]:
    """Return the model of every side."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    everybody = init_device_mesh("cpu", (4,))
    found = {NATIVE: model(mesh)}
    for name, options in SIDES.items():
        found[name] = model(mesh["shard"])
        quantize_all_reduce(found[name], QuantizedAllreduceState(mesh["node"], **options))
    found[NATIVE_FULL] = model(everybody)
    for name, options in FULL_SIDES.items():
        found[name] = model(everybody)
        quantize_reduce_scatter(found[name], QuantizedAllreduceState(everybody, **options))
    return found


def measure(rank: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the seconds of each side's passes, and its bytes for each parameter on this host's link."""
    sharded = models()
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def both_passes(model: torch.nn.Module) -> Callable[[], None]:
        return lambda: model(batch).square().mean().backward()

    sides = {name: both_passes(model) for name, model in sharded.items()}
    seconds = in_turns(sides, repeats, prepare=lambda name: sharded[name].zero_grad())
    # The gradients of all counted passes add up, which changes no byte.
    moved = {name: bytes_on_link(both, PASSES) / PARAMETERS for name, both in sides.items()}
    return seconds, moved


def native_of(side: str) -> str:
    """Return the side without our hooks that shards in the same way."""
    return NATIVE_FULL if side in (NATIVE_FULL, *FULL_SIDES) else NATIVE


def times_of(rate: str, repeats: int) -> dict[str, Any]:
    """Return times and bytes with one rate of the links."""
    ranks = on_ranks(measure, 4, repeats, rate=rate, placement=PLACEMENT)
    times = slowest([seconds for seconds, _ in ranks])
    for name, entry in times.items():
        entry["bytes_a_parameter"] = round(max(moved[name] for _, moved in ranks), 2)
    return times


def cases(options: Namespace) -> Iterator[Found]:
    """Measure with each rate of the links."""
    for rate, title in RATES.items():
        times = times_of(rate, options.repeats)
        for name, entry in times.items():
            entry["times_faster"] = round(times[native_of(name)]["median_ms"] / entry["median_ms"], 2)
        print_times(f"2 hosts of 2 ranks, {title}, load {load()}", times, native_of)
        yield ("times", rate), times


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times, one panel per rate."""
    panels = {RATES[rate]: bars_of(entries) for rate, entries in results["times"].items()}
    draw_bars(panels, "ms", path, title="Forward and backward with FSDP2, two emulated hosts of two ranks")


def main() -> None:
    """Measure, print, store and draw."""
    facts = {
        "hosts": 2,
        "ranks_per_host": 2,
        "parameters": PARAMETERS,
        "batch": BATCH,
        "load_average_before": load(),
    }
    Benchmark(__file__, __doc__, repeats=15).run({"times": cases}, facts=lambda _: facts, draw=draw)


if __name__ == "__main__":
    main()
