"""Predictions of larger clusters: curves over the number of ranks, and the cases of interest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from many_ranks.fitting import Model
from many_ranks.measuring import DIRECT, RING
from many_ranks.programs import Program, all_ranks
from many_ranks.rings import ring
from many_ranks.routes import direct, grid, planned
from many_ranks.simulation import Ranks, play

from ddp_quant_hooks.measure.cost_model import Cluster, KernelCost, Machine, Worker

__all__ = ["ASSUMED_GPU", "BUCKET", "Side", "breakdown", "curve", "one_case", "predict_all", "wire_limit"]

LEVELS, GRID = "8 bits in levels", "fp32 in nodes, 8 bits between"

RATES = (1.0, 10.0, 25.0, 100.0, 400.0)
"""The rates of the nodes' links, in Gbit/s."""

BUCKET = 25 * 2**20 // 4
"""Values in DDP's buckets; the first has a 25th of it."""
DDP_BUCKETS = (BUCKET // 25, BUCKET, BUCKET, BUCKET)


_MOST_MESSAGES = 1000
"""Messages per rank: beyond this, only the time of one bucket is predicted."""

MakeProgram: TypeAlias = Callable[[int, int, int], Program]
"""Makes a program from the number of ranks, the ranks per node, and the values of a bucket."""


@dataclass(frozen=True)
class Side:
    """A way to average, on a machine.

    Attributes:
        name: The side's name.
        program: Makes its program.
        machine: The cost of sending.
        worker: The cost of the rest.
        payload: The share of a link's bits that is payload.
        most_ranks: The most ranks for the curve: direct messages between more ranks are too many.
    """

    name: str
    program: MakeProgram
    machine: Machine
    worker: Worker
    payload: float = 0.95
    most_ranks: int = 4096


def ring_of(world: int, per_node: int, count: int) -> Program:
    """Return fp32 around a ring."""
    return ring(world, [count], played=4 if per_node == 1 and world > 64 else None)


@cache
def direct_of(world: int, per_node: int, count: int, on_host: bool = True) -> Program:
    """Return 8 bits sent from each rank to every other, whatever their number."""
    del per_node
    return all_ranks(direct, world, [count], on_host=on_host)


@cache
def planned_of(world: int, per_node: int, count: int, on_host: bool = True) -> Program:
    """Return 8 bits as planned: in levels, inside nodes first if nodes are known."""
    return all_ranks(planned(per_node), world, [count], on_host=on_host)


@cache
def grid_before_of(world: int, per_node: int, count: int, on_host: bool = True) -> Program:
    """Return fp32 inside nodes, and 8 bits from each node to every other."""
    return all_ranks(grid(world, per_node, in_levels=False), world, [count], on_host=on_host)


@cache
def grid_of(world: int, per_node: int, count: int, on_host: bool = True) -> Program:
    """Return fp32 inside nodes, and 8 bits between them as planned."""
    return all_ranks(grid(world, per_node), world, [count], on_host=on_host)


ASSUMED_GPU = {
    "machine": Machine(latency=9e-5, cpu_per_message=7.5e-5, cpu_per_byte=0.0, inside=1 / 200e9, between=0.0),
    "worker": Worker(
        bucket=1e-4,
        starting=1.0,
        kernels={
            "encode": KernelCost(5e-5, 0.0, 1.8e-12),
            "reduce": KernelCost(6e-5, 0.0, 6e-13),
            "decode": KernelCost(5e-5, 0.0, 1.8e-12),
            "elementwise": KernelCost(1e-5, 0.0, 4e-12),
        },
    ),
    "assumptions": [
        "Kernels run at 2 to 3 TB/s, and a launch takes 50 to 60 us of the host: as on an H100, no rotation.",
        "A message sent and one received take the host 75 us, as measured with ranks that share that GPU.",
        "Its flight takes 15 us; the GPU sends itself, inside a node at 200 GB/s.",
        "Launches, kernels and messages of a rank follow each other, which is on the long side.",
    ],
}


def wire_limit(world: int, per_node: int, gbit: float, values: int = BUCKET) -> float:
    """Return the seconds that one byte per value takes on the links of N nodes: 2 (N - 1) / N times that."""
    nodes = world // per_node
    return 2 * (nodes - 1) / nodes * values * 8e-9 / gbit


def one_case(
    side: Side, cluster: Cluster, counts: Sequence[int] = (BUCKET,), ranks: Ranks | None = None
) -> float:
    """Return the seconds until the last rank has the means of all buckets."""
    programs = [side.program(cluster.world, cluster.ranks_per_node, count) for count in counts]
    program = programs[0]
    for following in programs[1:]:
        program = program.followed_by(following)
    cluster = replace(cluster, world=program.world, gbit=cluster.gbit * side.payload)
    return float(play(program, cluster, side.machine, side.worker, ranks)[-1].max())


def breakdown(side: Side, cluster: Cluster, counts: Sequence[int] = (BUCKET,)) -> dict[str, float]:
    """Return the seconds of a case, and how much it would save without each of its costs."""
    none = {name: KernelCost(0.0, 0.0, 0.0) for name in side.worker.kernels}
    flight = side.machine.latency - side.machine.cpu_per_message
    without = {
        "processor, messages": replace(
            side, machine=replace(side.machine, cpu_per_message=0.0, latency=flight)
        ),
        "processor, bytes": replace(side, machine=replace(side.machine, cpu_per_byte=0.0)),
        "kernels": replace(side, worker=replace(side.worker, kernels=none)),
        "latency": replace(side, machine=replace(side.machine, latency=side.machine.cpu_per_message)),
    }
    total = one_case(side, cluster, counts)
    return {"seconds": total} | {
        name: total - one_case(other, cluster, counts) for name, other in without.items()
    }


def curve(
    sides: Sequence[Side],
    worlds: Sequence[int],
    rates: Sequence[float],
    per_node: int = 1,
    tell: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Return the predicted seconds of one bucket by side, number of ranks and rate of the links."""
    rows = []
    for world in worlds:
        for side in sides:
            if world > side.most_ranks:
                continue
            began = time.perf_counter()
            for gbit in rates:
                seconds = one_case(side, Cluster(world, gbit, per_node))
                limit = wire_limit(world, per_node, gbit)
                rows.append(
                    {
                        "side": side.name,
                        "world": world,
                        "per_node": per_node,
                        "gbit": gbit,
                        "predicted_seconds": seconds,
                        "of_the_wire_limit": seconds / limit if limit else None,
                    }
                )
            count, _ = side.program(world, per_node, BUCKET).messages_of(0)
            tell(
                f"{side.name}, {world} ranks: {count} messages, "
                + ", ".join(f"{row['predicted_seconds'] * 1e3:.1f}" for row in rows[-len(rates) :])
                + f" ms; {time.perf_counter() - began:.1f} s"
            )
    return rows


ASSUMPTIONS = [
    "Every rank has two cores or more for itself: one computes and starts messages, one takes them in.",
    "Kernels, messages and bytes take of the processor what the fit found on loopback.",
    "Messages fly as long as between the emulated hosts, and links carry as much payload as theirs.",
    "Switches never fill up. Inside a node of several ranks each has 10 GB/s.",
    "Ranks are alike and begin together, but where stragglers are named.",
]


def predict_all(
    models: Mapping[str, Model],
    kernels: Mapping[str, KernelCost],
    starting: float,
    most: int,
    parts: Sequence[str],
) -> dict[str, Any]:
    """Return predictions: the curve, and the cases of interest.

    Args:
        models: The fitted models, by hook.
        kernels: The measured costs of the kernels.
        starting: See :class:`Worker`.
        most: The maximum number of ranks.
        parts: "cases", "curve", or both.
    """
    sides = _sides(models, kernels, starting)
    found: dict[str, Any] = {
        "these are": "predictions, none of it was measured",
        "assumptions": ASSUMPTIONS,
        "assumptions of the GPUs": ASSUMED_GPU["assumptions"],
    }
    if "cases" in parts:
        found |= {"cases": _cases(sides, most), "stragglers": _stragglers(sides, min(64, most))}
    if "curve" in parts:
        worlds = [2**power for power in range(1, 13) if 2**power <= most]
        found["curve"] = curve(sides["one rank a node"], worlds, RATES)
    return found


def _sides(
    models: Mapping[str, Model], kernels: Mapping[str, KernelCost], starting: float
) -> dict[str, list[Side]]:
    """Return the sides to predict: one rank per node, eight per node, and eight GPUs per node."""

    def side(name: str, program: MakeProgram, fitted: str = DIRECT, most_ranks: int = 4096) -> Side:
        model = models[fitted]
        machine = Machine(
            latency=model.latency_on_hosts + model.cpu_per_message,
            cpu_per_message=model.cpu_per_message,
            cpu_per_byte=model.cpu_per_byte,
            inside=1e-10,
            between=0.0,
        )
        return Side(name, program, machine, model.worker(kernels, starting), model.payload, most_ranks)

    def on_gpus(name: str, program: MakeProgram) -> Side:
        return Side(name, program, ASSUMED_GPU["machine"], ASSUMED_GPU["worker"])

    plain = side("fp32, ring", ring_of, RING)
    return {
        "one rank a node": [plain, side(DIRECT, direct_of, most_ranks=256), side(LEVELS, planned_of)],
        "eight ranks a node": [
            side(LEVELS, planned_of),
            side(GRID + ", direct", grid_before_of),
            side(GRID + ", in levels", grid_of),
        ],
        "eight GPUs a node": [
            on_gpus(DIRECT, partial(direct_of, on_host=False)),
            on_gpus(LEVELS, partial(planned_of, on_host=False)),
            on_gpus(GRID + ", direct", partial(grid_before_of, on_host=False)),
            on_gpus(GRID + ", in levels", partial(grid_of, on_host=False)),
        ],
    }


def _cases(sides: Mapping[str, Sequence[Side]], most: int) -> list[dict[str, Any]]:
    rows = []
    for world, per_node, gbit, where in (
        (64, 1, 25.0, "one rank a node"),
        (1024, 8, 100.0, "eight GPUs a node"),
        (1024, 8, 100.0, "eight ranks a node"),
    ):
        cluster = Cluster(min(world, most), gbit, per_node)
        limit = wire_limit(cluster.world, per_node, gbit)
        for side in sides[where]:
            count, nbytes = side.program(cluster.world, per_node, BUCKET).messages_of(0)
            if count > _MOST_MESSAGES:  # would take minutes per number
                parts, together = {"seconds": one_case(side, cluster)}, math.nan
            else:
                parts = breakdown(side, cluster)
                together = one_case(side, cluster, DDP_BUCKETS)
            limit_together = wire_limit(cluster.world, per_node, gbit, sum(DDP_BUCKETS))
            rows.append(
                {
                    "where": f"{cluster.world} ranks, {where}, {gbit:g} Gbit/s",
                    "side": side.name,
                    "messages": count,
                    "bytes": nbytes,
                    "predicted_seconds": parts.pop("seconds"),
                    "less_without": parts,
                    "wire_limit": limit,
                    "predicted_seconds_of_ddp_buckets": None if math.isnan(together) else together,
                    "wire_limit_of_ddp_buckets": limit_together,
                }
            )
            row = rows[-1]
            print(
                f"{row['where']}: {side.name}: {1e3 * row['predicted_seconds']:.2f} ms, "
                f"{row['predicted_seconds'] / limit:.2f} of the wire's limit; buckets of DDP "
                f"{together / limit_together:.2f}; without "
                + ", ".join(f"{name} {1e3 * less:.2f} ms less" for name, less in parts.items()),
                flush=True,
            )
    return rows


def _stragglers(sides: Mapping[str, Sequence[Side]], world: int, gbit: float = 25.0) -> list[dict[str, Any]]:
    """Return how much longer one bucket takes with unequal ranks, from the start of the last one."""
    cluster = Cluster(world, gbit)
    one_late, slow = np.zeros(world), np.ones(world)
    one_late[world // 2], slow[world // 2] = 0.02, 2.0
    kinds = {
        "none": Ranks(),
        "one begins 20 ms later": Ranks(late=one_late),
        "all begin within 20 ms": Ranks(late=np.random.default_rng(0).uniform(0, 0.02, world)),
        "one works half as fast": Ranks(slower=slow),
    }
    rows = []
    for side in sides["one rank a node"]:
        for kind, ranks in kinds.items():
            last = 0.0 if ranks.late is None else float(ranks.late.max())
            seconds = one_case(side, cluster, ranks=ranks) - last
            rows.append(
                {
                    "where": f"{world} nodes, {gbit:g} Gbit/s",
                    "side": side.name,
                    "stragglers": kind,
                    "predicted_seconds_after_the_last_began": seconds,
                }
            )
            print(f"{rows[-1]['where']}: {side.name}, stragglers: {kind}: {1e3 * seconds:.2f} ms", flush=True)
    return rows
