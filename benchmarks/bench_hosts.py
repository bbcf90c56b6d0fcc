"""Several ranks on each of several hosts: bytes on the hosts' links, time and error of an average.

    python benchmarks/bench_hosts.py                      # everything, about twenty minutes; needs root
    python benchmarks/bench_hosts.py --placements 0011 0101 --rates 1gbit --repeats 5
    python benchmarks/bench_hosts.py --only bytes
    python benchmarks/bench_hosts.py --only plot

A placement names the host of each rank: "0101" are four ranks on two hosts, placed in turns. A host is a
network namespace with a link limited in both directions; no launcher's variable tells a rank where it is.
One bucket of 12 MiB of normal values in fp32, on Gloo, through DDP's own bucket, whose parameters stay the
same from call to call, as in training.

* Bytes: what passes a host's interface in one call, in the busier direction on the busiest host, headers and
  acknowledgments included, for each value of the bucket (of the input of a reduce-scatter). The limit is one
  byte a value: 2 (H - 1) / H of the values on each of H hosts' links for an average; for a reduce-scatter
  each host receives the sums of all other hosts for its own shards, and sends its part of all other shards.
* Error: of the average against the exact one in fp64, relative, L2. Whether all ranks' averages are bitwise
  equal is compared by hash.
* Time: the slowest rank's, sides in turns.

Writes results/hosts.json and .png beside this file. Placements and rates that were not measured again keep
their results; each has its tree. All ranks share this machine's processors.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from drawing import BLUE, GRAY, GREEN, VERMILION, save, subplots
from emulated_hosts import address, emulated_hosts
from machine import describe_machine, describe_tree
from rank_processes import run_rank_processes
from timings import slowest

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from dist_utils.testing import grad_bucket

FILE = Path(__file__).parent / "results" / "hosts.json"
PLACEMENTS = ("0011", "0101", "001122", "00111", "00001111", "0000000011111111")
RATES = ("100mbit", "500mbit", "1gbit")
VALUES = 12 * 2**20 // 4
CALLS = 3
"""Calls whose bytes are counted together."""
MANY_RANKS, FEWER_REPEATS = 16, 5

PLAIN, DEFAULT, FLAT, INSIDE = "plain DDP", "default", 'intra_node="flat"', 'intra_node="quantized"'
ALL_REDUCE, SCATTER, PLAIN_SCATTER = "all_reduce", "reduce_scatter_tensor", "fp32 reduce_scatter_tensor"
SCATTERS = (SCATTER, PLAIN_SCATTER)
TIMED = (PLAIN, DEFAULT, FLAT, INSIDE)

Side: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Takes the bucket's buffer, filled with this rank's values, and returns the result."""


def knows_hosts() -> bool:
    """Return whether the tree's states have the option ``intra_node``."""
    return "intra_node" in inspect.signature(QuantizedAllreduceState).parameters


def make_sides(bucket: Any, ranks: int) -> dict[str, Side]:
    """Return every side, each with a state of its own."""
    shard = torch.empty(bucket.buffer().numel() // ranks)

    def hook(**options: Any) -> Side:
        state = QuantizedAllreduceState(**options)
        return lambda _: quantized_allreduce_hook(state, bucket).wait()

    def average(state: QuantizedAllreduceState) -> Side:
        def call(values: torch.Tensor) -> torch.Tensor:
            all_reduce(values, dist.ReduceOp.AVG, state)
            return values

        return call

    def scatter(call: Callable[[torch.Tensor, torch.Tensor], object]) -> Side:
        def side(values: torch.Tensor) -> torch.Tensor:
            call(shard, values)
            return shard

        return side

    scattering = QuantizedAllreduceState()
    return {
        PLAIN: lambda _: allreduce_hook(None, bucket).wait(),
        DEFAULT: hook(),
        **({FLAT: hook(intra_node="flat"), INSIDE: hook(intra_node="quantized")} if knows_hosts() else {}),
        ALL_REDUCE: average(QuantizedAllreduceState()),
        SCATTER: scatter(
            lambda output, values: reduce_scatter_tensor(output, values, dist.ReduceOp.SUM, scattering)
        ),
        PLAIN_SCATTER: scatter(dist.reduce_scatter_tensor),
    }


def values_of(rank: int, count: int) -> torch.Tensor:
    """Return a rank's values."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


def exact_mean(ranks: int, count: int) -> torch.Tensor:
    """Return the mean of all ranks' values in fp64."""
    total = torch.zeros(count, dtype=torch.float64)
    for rank in range(ranks):
        total += values_of(rank, count)
    return total / ranks


def interface_bytes() -> list[int]:
    """Return the bytes that this host's interface has received and sent so far."""
    # Not /sys/class/net: that belongs to the network in which it was mounted, this file to the process.
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            columns = numbers.split()
            return [int(columns[0]), int(columns[8])]
    raise RuntimeError("no interface eth0: not on an emulated host")


def count_bytes(sides: Mapping[str, Side], buffer: torch.Tensor, source: torch.Tensor) -> dict[str, Any]:
    """Return each side's bytes on this host's link by direction, its error and its result's hash."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    exact = exact_mean(ranks, len(source)) if rank == 0 else None
    found: dict[str, Any] = {"bytes": {}, "error": {}, "hash": {}}
    for name, side in sides.items():
        result = side(buffer.copy_(source))  # also connects, and agrees on the bucket
        if name not in SCATTERS:
            found["hash"][name] = hashlib.sha256(result.numpy().tobytes()).hexdigest()
            if exact is not None:
                found["error"][name] = float((result - exact).norm() / exact.norm())
        dist.barrier()
        before = interface_bytes()
        dist.barrier()
        for _ in range(CALLS):
            side(buffer.copy_(source))
        dist.barrier()
        found["bytes"][name] = [
            (now - then) / CALLS for now, then in zip(interface_bytes(), before, strict=True)
        ]
        dist.barrier()
    return found


def measure_times(
    sides: Mapping[str, Side], buffer: torch.Tensor, source: torch.Tensor, repeats: int
) -> dict[str, list[float]]:
    """Return the seconds of every run of every side, in turns forwards and backwards."""
    names = [name for name in TIMED if name in sides]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(-1, repeats):  # the first round warms up
        for name in names if repeat % 2 else reversed(names):
            buffer.copy_(source)
            dist.barrier()
            began = time.perf_counter()
            sides[name](buffer)
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def be_a_rank(folder: Path, repeats: int) -> None:
    """Count bytes if there are no repeats, else measure times, on one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bucket = grad_bucket([torch.zeros(VALUES // ranks * ranks)])
    buffer = bucket.buffer()
    source = values_of(rank, len(buffer))
    sides = make_sides(bucket, ranks)
    found = measure_times(sides, buffer, source, repeats) if repeats else count_bytes(sides, buffer, source)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def run_placement(placement: str, rate: str, repeats: int) -> list[dict[str, Any]]:
    """Run a placement's ranks on emulated hosts and return what each wrote."""
    names = sorted(set(placement))
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(len(names), rate=rate) as hosts:
        places = [hosts[names.index(name)] for name in placement]
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": address(names.index(placement[0]))}
        command = [__file__, "rank", "--folder", folder, "--repeats", str(repeats)]
        run_rank_processes(command, places, variables, timeout=1200)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(places))]


def limit(placement: str, *, scatter: bool) -> float:
    """Return the least bytes a value on the busiest host's link, with one byte for each value."""
    hosts = len(set(placement))
    if not scatter:
        return 2 * (hosts - 1) / hosts
    shares = [placement.count(host) / len(placement) for host in set(placement)]
    return max(max(share * (hosts - 1), 1 - share) for share in shares)


def summarize_bytes(placement: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bytes a value on the busiest host's link, errors, and whether ranks are equal."""
    values = VALUES // len(placement) * len(placement)
    sides = {}
    for name in found[0]["bytes"]:
        least = limit(placement, scatter=name in SCATTERS)
        busiest = max(max(rank["bytes"][name]) for rank in found)  # ranks of a host share its interface
        entry: dict[str, Any] = {
            "bytes_a_value": round(busiest / values, 3),
            "limit": round(least, 3),
            "of_limit": round(busiest / values / least, 3),
        }
        if name not in SCATTERS:
            entry["relative_error"] = float(f"{found[0]['error'][name]:.4g}")
            entry["ranks_equal"] = len({rank["hash"][name] for rank in found}) == 1
        sides[name] = entry
    return sides


def measure(options: argparse.Namespace, known: Mapping[str, Any]) -> None:
    """Measure what was chosen and write it together with what is known, after each placement."""
    placements = dict(known.get("placements", {}))
    for placement in options.placements:
        entry = placements.setdefault(placement, {})
        entry |= {"ranks": len(placement), "hosts": len(set(placement))}
        if options.only != "times":
            found = run_placement(placement, "1gbit", 0)
            entry["bytes"] = {"tree": describe_tree(), "sides": summarize_bytes(placement, found)}
            report_bytes(placement, entry["bytes"]["sides"])
        if options.only != "bytes":
            few = len(placement) >= MANY_RANKS
            repeats = min(options.repeats, FEWER_REPEATS) if few else options.repeats
            for rate in options.rates:
                times = slowest(run_placement(placement, rate, repeats))
                entry.setdefault("ms", {})[rate] = {
                    "tree": describe_tree(),
                    "repeats": repeats,
                    "load_average": round(os.getloadavg()[0], 1),
                    "sides": times,
                }
                text = ", ".join(f"{name} {side['median_ms']:.0f}" for name, side in times.items())
                print(f"{placement}, {rate}, ms: {text}", flush=True)
        results = {**describe_machine(), "bucket_values": VALUES, "placements": placements}
        options.output.write_text(json.dumps(results, indent=1) + "\n")


def report_bytes(placement: str, sides: Mapping[str, Any]) -> None:
    """Print a placement's bytes and errors."""
    print(f"{placement}: bytes a value on the busiest host's link, limit, share; error; ranks equal")
    for name, entry in sides.items():
        error = (
            f"{entry['relative_error']:10.2e}  {entry['ranks_equal']}" if "relative_error" in entry else ""
        )
        print(
            f"  {name:<30}{entry['bytes_a_value']:7.2f}{entry['limit']:7.2f}{entry['of_limit']:7.2f}{error}",
            flush=True,
        )


def print_tables(results: Mapping[str, Any]) -> None:
    """Print bytes and times as tables for the documents."""
    for rate in ("", *RATES):
        rows = {}
        for placement, entry in results["placements"].items():
            measured = entry.get("ms", {}).get(rate) if rate else entry.get("bytes")
            if measured:
                rows[placement] = measured["sides"]
        if not rows:
            continue
        names = list(dict.fromkeys(name for sides in rows.values() for name in sides))
        print(f"\n| {f'ms, {rate}' if rate else 'bytes a value'} | {' | '.join(names)} |")
        print("|---" * (len(names) + 1) + "|")
        for placement, sides in rows.items():
            entries = [sides.get(name) for name in names]
            cells = [
                "" if entry is None
                else f"{entry['median_ms']:.0f}" if rate
                else f"{entry['bytes_a_value']:.2f} ({entry['limit']:.2f})"
                for entry in entries
            ]  # fmt: skip
            print(f"| {placement} | {' | '.join(cells)} |")


COLORS = {PLAIN: GRAY, FLAT: VERMILION, INSIDE: GREEN, DEFAULT: BLUE}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bytes and times of each placement, as points beside each other on one line."""
    placements = results["placements"]
    rates = [rate for rate in RATES if any(rate in entry.get("ms", {}) for entry in placements.values())]
    panels = ["bytes", *rates] if any("bytes" in entry for entry in placements.values()) else rates
    figure, axes = subplots(
        [0.5 + 0.24 * len(placements)] * len(panels), "Averaging 12 MiB, by the host of each rank"
    )
    for axis, panel in zip(axes, panels, strict=True):
        for place, entry in enumerate(placements.values()):
            measured = entry.get("bytes") if panel == "bytes" else entry.get("ms", {}).get(panel)
            sides = measured["sides"] if measured else {}
            if panel == "bytes" and PLAIN in sides:
                axis.plot(sides[PLAIN]["limit"], place, "|", color="black", markersize=12)
            for name, color in COLORS.items():
                if name in sides:
                    value = sides[name]["bytes_a_value" if panel == "bytes" else "median_ms"]
                    axis.plot(value, place, "o", color=color, markersize=5)
        axis.set_xlim(left=0)
        axis.grid(axis="x", color="0.9")
        axis.set_yticks(range(len(placements)), placements)
        axis.set_ylim(len(placements) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        text = "bytes a value on the busiest host's link (bar: limit)" if panel == "bytes" else f"ms, {panel}"
        axis.set_title(
            text.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s"), loc="left", fontsize="small"
        )
    names = [name for name in COLORS if any(name in _sides(entry) for entry in placements.values())]
    points = [axes[0].plot([], [], "o", color=COLORS[name], markersize=5)[0] for name in names]
    figure.legend(points, names, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    save(figure, path)


def _sides(entry: Mapping[str, Any]) -> set[str]:
    measured = [entry[part] for part in ("bytes",) if part in entry] + list(entry.get("ms", {}).values())
    return {name for one in measured for name in one["sides"]}


def main() -> None:
    """Measure, print, store and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["measure", "rank"], default="measure", help=argparse.SUPPRESS
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(
        "--placements", nargs="+", default=PLACEMENTS, help="the host of each rank, as digits"
    )
    parser.add_argument("--rates", nargs="+", default=RATES, help="of each link, as for tc")
    parser.add_argument("--repeats", type=int, default=15, help="at least 2; 16 ranks have at most 5")
    parser.add_argument("--only", choices=["bytes", "times", "plot"])
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    if options.part == "rank":
        be_a_rank(options.folder, options.repeats)
        return
    if options.repeats < 2:
        parser.error("--repeats must be at least 2, for the quartiles")
    if options.only != "plot":
        if not knows_hosts():
            print("states of this tree have no intra_node: without its variants")
        options.output.parent.mkdir(parents=True, exist_ok=True)
        measure(options, json.loads(options.output.read_text()) if options.output.exists() else {})
    results = json.loads(options.output.read_text())
    print_tables(results)
    draw(results, options.output.with_suffix(".png"))
    print(f"written: {options.output} and .png")


if __name__ == "__main__":
    main()
