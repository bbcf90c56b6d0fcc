"""FSDP2 with averages in few bits between nodes against native HSDP: forward and backward on slow links.

    python benchmarks/bench_fsdp.py --repeats 15

Two emulated hosts with two ranks each; 8.4 million parameters in 8 layers, each with ``fully_shard``. All
sides run in the same processes, in turns forwards and backwards. Writes results/fsdp.json and .png: median
and quartiles of the slowest rank's time for one forward and backward pass.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bar_charts import bars_of, draw_bars
from hook_harness import run_on_hosts
from machine import describe_machine
from timings import slowest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.fsdp import quantize_all_reduce

RESULTS = Path(__file__).parent / "results"
LAYERS, WIDTH, BATCH = 8, 1024, 64
NATIVE = "native HSDP, fp32"
SIDES: dict[str, dict[str, Any]] = {
    "ours: fp32, overlapped": {"min_bytes": 1 << 40},
    "ours: 8 bits": {},
    "ours: 8 bits, feedback both": {"error_feedback": "both"},
    "ours: 4 bits": {"bits": 4},
}
RATES = ("1gbit", "200mbit")


def model(mesh: DeviceMesh) -> torch.nn.Module:
    """Return the model, sharded layer by layer."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(torch.nn.Sequential(*layers), mesh=mesh)


def be_a_rank(folder: Path, repeats: int) -> None:
    """Measure on one rank, and write the seconds of every side."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))
    models = {NATIVE: model(mesh)}
    for name, options in SIDES.items():
        models[name] = model(mesh["shard"])
        quantize_all_reduce(models[name], QuantizedAllreduceState(mesh["node"], **options))
    batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(-2, repeats):  # the first rounds warm up
        for name in list(models) if repeat % 2 else reversed(list(models)):
            models[name].zero_grad()
            dist.barrier()
            began = time.perf_counter()
            models[name](batch).square().mean().backward()
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(seconds))
    dist.barrier()
    dist.destroy_process_group()


RATE_NAMES = {"1gbit": "1 Gbit/s", "200mbit": "0.2 Gbit/s"}


def draw(result: dict[str, Any]) -> None:
    """Draw the times, one panel per rate."""
    bars = {RATE_NAMES[rate]: bars_of(entries) for rate, entries in result["times"].items()}
    title = "Forward and backward with HSDP, two emulated hosts of two ranks"
    draw_bars(bars, "ms", RESULTS / "fsdp.png", title=title)


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", nargs="?", choices=["all", "rank"], default="all")
    parser.add_argument("folder", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plot", action="store_true", help="only draw the stored numbers again")
    options = parser.parse_args()
    if options.plot:
        draw(json.loads((RESULTS / "fsdp.json").read_text()))
        return
    if options.part == "rank":
        be_a_rank(options.folder, options.repeats)
        return
    result: dict[str, Any] = {
        **describe_machine(),
        "hosts": 2,
        "ranks_per_host": 2,
        "parameters": LAYERS * (WIDTH + 1) * WIDTH,
        "batch": BATCH,
        "repeats": options.repeats,
        "load_average_before": os.getloadavg(),
    }
    times = {}
    for rate in RATES:
        ranks = run_on_hosts(
            [__file__, "rank"], [f"--repeats={options.repeats}"], 2, rate=rate, ranks_per_host=2
        )
        times[rate] = slowest(ranks)
        native = times[rate][NATIVE]["median_ms"]
        print(f"\n2 hosts of 2 ranks, {rate}: ms, median [quartiles]; times faster than native HSDP")
        for name, entry in times[rate].items():
            entry["times_faster"] = round(native / entry["median_ms"], 2)
            print(
                f"  {name:<30}{entry['median_ms']:8.0f} {entry['quartiles_ms']} {entry['times_faster']:.2f}x"
            )
    result["times"] = times
    result["load_average_after"] = os.getloadavg()
    (RESULTS / "fsdp.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result)


if __name__ == "__main__":
    main()
