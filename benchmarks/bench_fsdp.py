"""FSDP2 with averages in few bits against native FSDP2: forward and backward on slow links.

    python benchmarks/bench_fsdp.py --repeats 15

Two emulated hosts with two ranks each; 8.4 million parameters in 8 layers, each with ``fully_shard``: sharded
inside the hosts and replicated between them (HSDP), or sharded over all ranks. Times are of the slowest rank,
for one forward and backward pass. Bytes are what passes a host's interface in one pass, in the busier
direction, headers and acknowledgments included, for each parameter. Writes results/fsdp.json and .png.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from drawing import bars_of, draw_bars
from fsdp_steps import BATCH, PARAMETERS, RATES, model, times_of
from harness import Benchmark, Found, load, print_times
from torch.distributed.device_mesh import init_device_mesh

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce, quantize_reduce_scatter

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


def native_of(side: str) -> str:
    """Return the side without our hooks that shards in the same way."""
    return NATIVE_FULL if side in (NATIVE_FULL, *FULL_SIDES) else NATIVE


def times(rate: str, repeats: int) -> dict[str, Any]:
    """Return times and bytes with one rate of the links."""
    return times_of(models, native_of, rate=rate, repeats=repeats)


def cases(options: Namespace) -> Iterator[Found]:
    """Measure with each rate of the links."""
    for rate, title in RATES.items():
        found = times(rate, options.repeats)
        print_times(f"2 hosts of 2 ranks, {title}, load {load()}", found, native_of)
        yield ("times", rate), found


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the times, one panel per rate."""
    panels = {RATES[rate]: bars_of(entries) for rate, entries in results["times"].items()}
    draw_bars(panels, "ms", path, title="Forward and backward with FSDP2, two emulated hosts of two ranks")


if __name__ == "__main__":
    facts = {
        "hosts": 2,
        "ranks_per_host": 2,
        "parameters": PARAMETERS,
        "batch": BATCH,
        "load_average_before": load(),
    }
    Benchmark(__file__, __doc__, repeats=15).run({"times": cases}, facts=facts, draw=draw)
