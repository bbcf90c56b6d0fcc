"""The cost model, fitted to measurements, and its errors on cases that the fit did not use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from many_ranks.measuring import RING
from many_ranks.programs import Program, all_ranks
from many_ranks.rings import ring
from many_ranks.routes import direct
from many_ranks.simulation import Ranks, play

from ddp_quant_hooks.measure.cost_model import Cluster, KernelCost, Machine, Worker

__all__ = ["Case", "Model", "compare", "fit", "fit_kernels"]

_BOUNDS = {
    "payload": (0.85, 0.957),  # a frame of 1,514 bytes has 1,448 of payload
    "kernels": (0.8, 2.5),
    "busy": (1.0, 2.0),
    "busy_on_hosts": (0.3, 2.0),
    "latency": (5e-6, 1e-3),
    "latency_on_hosts": (5e-6, 1e-3),
}
"""The ranges of the fitted parameters."""


@dataclass(frozen=True)
class Case:
    """One measured case.

    Attributes:
        hook: The hook's name.
        world: Number of ranks.
        gbit: Of the hosts' links; ``None`` on loopback.
        size: Of the bucket, in bytes.
        seconds: As measured.
        cores: Of the machine, which all ranks share.
    """

    hook: str
    world: int
    gbit: float | None
    size: int
    seconds: float
    cores: int = 2


@dataclass(frozen=True)
class Model:
    """The fitted parameters for one hook, in seconds except for shares.

    Attributes:
        bucket: From a bucket's handing over to its begin.
        cpu_per_message: Of the processor, sending and receiving.
        cpu_per_byte: Likewise, on loopback.
        cpu_per_byte_on_hosts: On the emulated hosts, whose every packet passes a bridge.
        memory_per_byte: More for each other rank on the machine: they share its memory.
        latency: Of the wire, on loopback.
        latency_on_hosts: On the emulated hosts.
        busy: How many cores the two threads of a rank keep busy, on loopback.
        busy_on_hosts: On the emulated hosts, where they also wait for the wire.
        kernels: How many times as long kernels take as alone, with caches and memory shared.
        payload: What share of a link's bits is payload.
    """

    bucket: float = 4e-4
    cpu_per_message: float = 1e-4
    cpu_per_byte: float = 1e-9
    cpu_per_byte_on_hosts: float = 2.5e-9
    memory_per_byte: float = 2e-11
    latency: float = 2e-5
    latency_on_hosts: float = 3e-5
    busy: float = 1.5
    busy_on_hosts: float = 1.0
    kernels: float = 1.5
    payload: float = 0.95

    def seconds(self, case: Case, kernels: Mapping[str, KernelCost], starting: float) -> float:
        """Return what the model says of a case."""
        on_hosts = case.gbit is not None
        machine = Machine(
            latency=(self.latency_on_hosts if on_hosts else self.latency) + self.cpu_per_message,
            cpu_per_message=self.cpu_per_message,
            cpu_per_byte=(self.cpu_per_byte_on_hosts if on_hosts else self.cpu_per_byte)
            + (case.world - 1) * self.memory_per_byte,
            inside=0.0,
            between=0.0,
        )
        cluster = Cluster(case.world, (case.gbit or 1e6) * self.payload)
        busy = self.busy_on_hosts if on_hosts else self.busy
        ranks = Ranks(cores=case.cores / case.world, busy=busy)
        return float(
            play(
                program_of(case.hook, case.world, case.size),
                cluster,
                machine,
                self.worker(kernels, starting),
                ranks,
            ).max()
        )

    def worker(self, kernels: Mapping[str, KernelCost], starting: float) -> Worker:
        """Return the rank's own work."""
        scaled = {
            name: KernelCost(*(self.kernels * part for part in (one.call, one.message, one.value)))
            for name, one in kernels.items()
        }
        return Worker(self.bucket, starting, scaled)


@cache
def program_of(hook: str, world: int, size: int) -> Program:
    """Return the program of a hook on one bucket."""
    count = [size // 4]
    return ring(world, count) if hook == RING else all_ranks(direct, world, count)


def fit(cases: Sequence[Case], kernels: Mapping[str, KernelCost], starting: float, rounds: int = 40) -> Model:
    """Return the model with the least squares of relative errors, each number changed in turn.

    Args:
        cases: The cases of one hook.
        kernels: The kernels' costs, measured alone.
        starting: See :class:`Worker`.
        rounds: Number of rounds; steps halve after a round without improvement.
    """
    model, step = Model(), 0.4
    names = list(asdict(model))

    def loss(tried: Model) -> float:
        found = [math.log(tried.seconds(case, kernels, starting) / case.seconds) for case in cases]
        return sum(min(one * one, 0.25) for one in found)  # so that one disturbed time cannot distort the fit

    best = loss(model)
    for _ in range(rounds):
        before = best
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(model, name) * factor
                low, high = _BOUNDS.get(name, (0.0, math.inf))
                if not low <= value <= high:
                    continue
                tried = replace(model, **{name: value})
                if (found := loss(tried)) < best:
                    model, best = tried, found
                    break
        if best > 0.97 * before:
            step /= 2
            if step < 0.01:
                break
    return model


def compare(
    model: Model, cases: Iterable[Case], kernels: Mapping[str, KernelCost], starting: float
) -> list[dict[str, Any]]:
    """Return the measured time, the model's, and the ratio, for each case."""
    rows = []
    for case in cases:
        found = model.seconds(case, kernels, starting)
        rows.append({**asdict(case), "model": found, "ratio": found / case.seconds})
    return rows


def fit_kernels(points: Sequence[Mapping[str, Any]]) -> dict[str, KernelCost]:
    """Return the planes through the kernels' points: seconds per call, message and value."""
    found = {}
    for kernel in {point["kernel"]: None for point in points}:
        own = [point for point in points if point["kernel"] == kernel]
        columns = np.array([[1.0, point["messages"], point["values"]] for point in own])
        seconds = np.array([point["seconds"] for point in own])
        several = len({point["messages"] for point in own}) > 1
        used = [0, 1, 2] if several else [0, 2]
        solved = np.zeros(3)
        weights = 1 / seconds  # relative errors
        solved[used] = np.linalg.lstsq(columns[:, used] * weights[:, None], seconds * weights, rcond=None)[0]
        found[kernel] = KernelCost(*(max(0.0, float(part)) for part in solved))
    return found
