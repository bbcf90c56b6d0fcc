"""Several ranks on each of several hosts: bytes on the hosts' links, time and error of an average.

    python benchmarks/bench_hosts.py                      # everything, about twenty minutes; needs root
    python benchmarks/bench_hosts.py times --placements 0011 0101 --rates 1gbit --repeats 5
    python benchmarks/bench_hosts.py bytes

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

Plain DDP is PyTorch's ``allreduce_hook``, which does what DDP does without a hook.

Writes results/hosts.json and .png. All ranks share this machine's processors.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from buckets import real_bucket
from drawing import BLUE, GRAY, GREEN, VERMILION, save, subplots
from harness import Benchmark, Found, bytes_on_link, in_turns, load, print_times, slowest
from machine import describe_tree
from rank_processes import on_ranks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_quant_hooks import (
    QuantizedAllreduceState,
    all_reduce,
    quantized_allreduce_hook,
    reduce_scatter_tensor,
)
from dist_utils.testing import same_on_all_ranks

PLACEMENTS = ("0011", "0101", "001122", "00111", "00001111", "0000000011111111")
RATES = {"100mbit": "0.1 Gbit/s", "500mbit": "0.5 Gbit/s", "1gbit": "1 Gbit/s"}
VALUES = 12 * 2**20 // 4
CALLS = 3
"""Calls whose bytes are counted together."""
MANY_RANKS, FEWER_REPEATS = 16, 5

PLAIN, DEFAULT, FLAT, INSIDE = "plain DDP", "default", 'intra_node="flat"', 'intra_node="quantized"'
ALL_REDUCE, SCATTER, PLAIN_SCATTER = "all_reduce", "reduce_scatter_tensor", "fp32 reduce_scatter_tensor"
SCATTERS = (SCATTER, PLAIN_SCATTER)
TIMED = (PLAIN, DEFAULT, FLAT, INSIDE)

Side: TypeAlias = Callable[[], torch.Tensor]
"""Averages the bucket's buffer, filled with this rank's values, and returns the result."""


def make_sides(bucket: Any) -> dict[str, Side]:
    """Return every side, each with a state of its own."""
    values = bucket.buffer()
    shard = torch.empty(values.numel() // dist.get_world_size())
    averaging, scattering = QuantizedAllreduceState(), QuantizedAllreduceState()

    def hook(**options: Any) -> Side:
        state = QuantizedAllreduceState(**options)
        return lambda: quantized_allreduce_hook(state, bucket).wait()

    def average() -> torch.Tensor:
        all_reduce(values, dist.ReduceOp.AVG, averaging)
        return values

    def scatter() -> torch.Tensor:
        reduce_scatter_tensor(shard, values, dist.ReduceOp.SUM, scattering)
        return shard

    def plain_scatter() -> torch.Tensor:
        dist.reduce_scatter_tensor(shard, values)
        return shard

    return {
        PLAIN: lambda: allreduce_hook(dist.group.WORLD, bucket).wait(),
        DEFAULT: hook(),
        FLAT: hook(intra_node="flat"),
        INSIDE: hook(intra_node="quantized"),
        ALL_REDUCE: average,
        SCATTER: scatter,
        PLAIN_SCATTER: plain_scatter,
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


def count_bytes(rank: int) -> dict[str, dict[str, Any]]:
    """Return each side's bytes on this host's link in the busier direction, its error, and if ranks agree."""
    ranks = dist.get_world_size()
    bucket = real_bucket(VALUES // ranks * ranks)
    buffer = bucket.buffer()
    source = values_of(rank, len(buffer))
    exact = exact_mean(ranks, len(source))
    found: dict[str, dict[str, Any]] = {}
    for name, side in make_sides(bucket).items():
        buffer.copy_(source)
        result = side()  # also connects, and agrees on the bucket
        found[name] = {}
        if name not in SCATTERS:
            found[name]["relative_error"] = float(f"{(result - exact).norm() / exact.norm():.4g}")
            found[name]["ranks_equal"] = same_on_all_ranks(result)

        def call(side: Side = side) -> None:
            buffer.copy_(source)
            side()

        found[name]["bytes_a_value"] = bytes_on_link(call, CALLS) / len(source)
    return found


def measure_times(rank: int, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every run of every side."""
    ranks = dist.get_world_size()
    bucket = real_bucket(VALUES // ranks * ranks)
    source = values_of(rank, len(bucket.buffer()))
    sides = {name: side for name, side in make_sides(bucket).items() if name in TIMED}
    return in_turns(sides, repeats, warm_up=1, prepare=lambda _: bucket.buffer().copy_(source))


def on_placement(function: Callable[..., Any], placement: str, rate: str, *args: Any) -> list[Any]:
    """Run a function on every rank of a placement."""
    names = sorted(set(placement))
    places = [names.index(host) for host in placement]
    return on_ranks(function, len(places), *args, rate=rate, placement=places, timeout=1200)


def limit(placement: str, *, scatter: bool) -> float:
    """Return the least bytes a value on the busiest host's link, with one byte for each value."""
    hosts = len(set(placement))
    if not scatter:
        return 2 * (hosts - 1) / hosts
    shares = [placement.count(host) / len(placement) for host in set(placement)]
    return max(max(share * (hosts - 1), 1 - share) for share in shares)


def summarize_bytes(placement: str, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the bytes a value on the busiest host's link, errors, and whether ranks are equal."""
    sides = {}
    for name, first in ranks[0].items():
        least = limit(placement, scatter=name in SCATTERS)
        busiest = max(rank[name]["bytes_a_value"] for rank in ranks)  # ranks of a host share its interface
        sides[name] = {
            **first,
            "bytes_a_value": round(busiest, 3),
            "limit": round(least, 3),
            "of_limit": round(busiest / least, 3),
        }
    return sides


def all_bytes(options: Namespace) -> Iterator[Found]:
    """Count the bytes of every placement."""
    for placement in options.placements:
        sides = summarize_bytes(placement, on_placement(count_bytes, placement, "1gbit"))
        print(f"{placement}: bytes a value on the busiest host's link, its limit, error, ranks equal")
        for name, entry in sides.items():
            numbers = f"{entry['bytes_a_value']:7.2f}{entry['limit']:7.2f}{entry['of_limit']:7.2f}"
            print(f"  {name:<30}{numbers}  {entry.get('relative_error')} {entry.get('ranks_equal')}")
        yield ("placements", placement, "ranks"), len(placement)
        yield ("placements", placement, "hosts"), len(set(placement))
        yield ("placements", placement, "bytes"), {"tree": describe_tree(), "sides": sides}


def all_times(options: Namespace) -> Iterator[Found]:
    """Measure every placement with every rate."""
    for placement in options.placements:
        few = len(placement) >= MANY_RANKS
        repeats = min(options.repeats, FEWER_REPEATS) if few else options.repeats
        for rate in options.rates:
            times = slowest(on_placement(measure_times, placement, rate, repeats))
            print_times(f"{placement}, {rate}, load {load()}", times, PLAIN)
            about = {"tree": describe_tree(), "repeats": repeats, "load_average": load()[0]}
            yield ("placements", placement, "ms", rate), {**about, "sides": times}


COLORS = {PLAIN: GRAY, FLAT: VERMILION, INSIDE: GREEN, DEFAULT: BLUE}
LABELS = {
    "00001111": {PLAIN: PLAIN, FLAT: '"flat"', DEFAULT: DEFAULT},
    "0000000011111111": {INSIDE: 'ring: "quantized"'},
}
"""Names in the picture: in rows of the first panel where other points leave room to the right."""


def describe(placement: str) -> str:
    """Say how many ranks each host has."""
    counts = sorted(Counter(placement).values())
    if len(set(counts)) > 1:
        return f"hosts of {' and '.join(map(str, counts))} ranks"
    in_turns = "" if list(placement) == sorted(placement) else ", in turns"
    return f"{len(counts)} hosts of {counts[0]} ranks{in_turns}"


def marker(name: str) -> dict[str, Any]:
    """Return how to draw a side; one is a ring, which a point beneath or above does not hide."""
    ring = {"markersize": 9, "markerfacecolor": "none"} if name == INSIDE else {"markersize": 5}
    return {"marker": "o", "linestyle": "", "color": COLORS[name], **ring}


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Draw bytes and times of each placement, as points beside each other on one line."""
    placements = results["placements"]
    panels = {"bytes": {name: entry["bytes"] for name, entry in placements.items() if "bytes" in entry}}
    for rate in RATES:
        panels[rate] = {
            name: entry["ms"][rate] for name, entry in placements.items() if rate in entry.get("ms", {})
        }
    panels = {panel: rows for panel, rows in panels.items() if rows}
    heights = [0.5 + 0.24 * len(rows) for rows in panels.values()]
    figure, axes = subplots(heights, "Averaging 12 MiB on hosts of several ranks (CPUs, Gloo, emulated)")
    for axis, (panel, rows) in zip(axes, panels.items(), strict=True):
        for place, (placement, row) in enumerate(rows.items()):
            sides = row["sides"]
            if panel == "bytes" and PLAIN in sides:
                axis.plot(sides[PLAIN]["limit"], place, "|", color="black", markersize=12)
            for name, color in COLORS.items():
                if name in sides:
                    value = sides[name]["bytes_a_value" if panel == "bytes" else "median_ms"]
                    axis.plot(value, place, **marker(name))
                    if axis is axes[0] and (label := LABELS.get(placement, {}).get(name)):
                        look = {"color": color, "fontsize": "small", "va": "center"}
                        axis.annotate(label, (value, place), (8, 0), textcoords="offset points", **look)
        axis.set_xlim(left=0)
        axis.grid(axis="x", color="0.9")
        axis.set_yticks(range(len(rows)), map(describe, rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.tick_params(axis="y", length=0)
        text = "bytes a value on a host's link (bar: limit)" if panel == "bytes" else f"ms, {RATES[panel]}"
        axis.set_title(text, loc="left", fontsize="small")
    save(figure, path)


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=15)
    add = benchmark.parser.add_argument
    add("--placements", nargs="+", default=PLACEMENTS, help="the host of each rank, as digits")
    add("--rates", nargs="+", default=[*RATES], help="of each link, as for tc")
    benchmark.run({"bytes": all_bytes, "times": all_times}, facts={"bucket_values": VALUES}, draw=draw)
