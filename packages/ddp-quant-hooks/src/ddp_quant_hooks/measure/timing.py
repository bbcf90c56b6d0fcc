"""What every hook costs on buckets of several sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.computation import Computation
from ddp_quant_hooks.measure.schedule import Progress, run_trials
from ddp_quant_hooks.measure.trials import Gradients, Sample, Trial, tiny_bucket
from ddp_quant_hooks.state import QuantizedAllreduceState

__all__ = ["DIRECT", "GRID", "RING", "Beside", "Exchange", "HookTimes", "measure_hooks"]

RING, DIRECT, GRID = "ring", "direct", "grid"
"""How averages are sent: around a ring, from each rank to every other, or first inside nodes."""


@dataclass(frozen=True)
class Beside:
    """The times of an average while every rank computes; medians of the slowest rank.

    Attributes:
        seconds: Until the average is there.
        lost: The extra seconds of the computation that was done meanwhile, compared with computing alone.
        repeats: How often it was measured.
    """

    seconds: float
    lost: float
    repeats: int


@dataclass(frozen=True)
class Exchange:
    """The times of an average of one bucket; medians of the slowest rank.

    Attributes:
        size: The size of the bucket, in bytes.
        seconds: Until the average is there, when nothing else is computed.
        quartiles: The lower and upper quartile of ``seconds``.
        cpu_seconds: Processor time of a rank; 0 with an accelerator, for which the processor only waits.
        repeats: How often it was measured.
        bytes_sent: Payload that a rank sends.
        relative_error: The relative error of the first average of normal values, in the L2 norm.
        beside: The same beside computation; ``None`` where the budget did not allow it.
    """

    size: int
    seconds: float
    quartiles: tuple[float, float]
    cpu_seconds: float
    repeats: int
    bytes_sent: int
    relative_error: float
    beside: Beside | None = None


@dataclass(frozen=True)
class HookTimes:
    """One hook on buckets of several sizes.

    Attributes:
        name: As in the list of candidates.
        pattern: ``"ring"``, ``"direct"`` (each rank to every other) or ``"grid"`` (first inside nodes).
        exchanges: By rising size, without those that the budget did not allow.
    """

    name: str
    pattern: str
    exchanges: list[Exchange]

    def at(self, size: int) -> Exchange | None:
        """Return what was measured with buckets of ``size`` bytes, if it was."""
        return next((exchange for exchange in self.exchanges if exchange.size == size), None)


def measure_hooks(
    group: dist.ProcessGroup,
    candidates: Mapping[str, Candidate],
    sizes: Sequence[int],
    device: torch.device,
    *,
    budget: float,
    guess: float,
    progress: Progress,
) -> tuple[list[HookTimes], float]:
    """Measure every hook on buckets of every size, alone and beside computation; and copying.

    Args:
        group: The process group whose ranks average.
        candidates: The hooks by name.
        sizes: Of buckets, in bytes.
        device: The device of the buckets.
        budget: Seconds for all of it.
        guess: Seconds for a byte of a bucket, to leave out what does not fit.
        progress: Called before each run.

    Returns:
        The hooks, and the seconds that copying a byte of a gradient takes; identical on all ranks.
    """
    began = time.perf_counter()
    gradients, computation = Gradients(group, max(sizes), device), Computation(device)
    trials = []
    for size in sorted(sizes):
        buckets = {name: tiny_bucket(device) for name in candidates}
        trials += [
            Trial(name, candidate, size, beside, buckets[name], group, gradients, computation)
            for beside in (False, True)
            for name, candidate in candidates.items()
        ]
    copy_per_byte = gradients.copy_seconds()
    (used,) = largest_of_ranks(group, [time.perf_counter() - began])
    samples = run_trials(trials, group, max(budget / 2, budget - used), guess, progress)
    measured = _of_slowest(group, samples, computation.seconds_per_unit)
    hooks = [
        HookTimes(name, _pattern(candidate), _exchanges(name, trials, measured))
        for name, candidate in candidates.items()
    ]
    return hooks, copy_per_byte


def _pattern(candidate: Candidate) -> str:
    if isinstance(candidate.state, HierarchicalAllreduceState):
        return GRID
    return DIRECT if isinstance(candidate.state, QuantizedAllreduceState) else RING


class _Times(NamedTuple):
    """The measurements of a trial."""

    seconds: list[float]
    """The time of every run, on the slowest rank."""
    cpu: float
    lost: float


def _of_slowest(
    group: dist.ProcessGroup, samples: Mapping[int, Sequence[Sample]], unit: float
) -> dict[int, _Times]:
    """Return the times of the slowest rank, and the largest of the ranks' medians of the rest.

    Args:
        group: The group of the ranks.
        samples: The samples of this rank, by place.
        unit: Seconds of a unit of computation beside nothing, on this rank.
    """
    own: list[float] = []
    for found in samples.values():
        own += [sample.seconds for sample in found]
        own.append(statistics.median(sample.cpu for sample in found))
        own.append(statistics.median(sample.seconds - unit * sample.units for sample in found))
    largest = iter(largest_of_ranks(group, own))
    return {
        place: _Times([next(largest) for _ in found], next(largest), next(largest))
        for place, found in samples.items()
    }


def _exchanges(name: str, trials: Sequence[Trial], measured: Mapping[int, _Times]) -> list[Exchange]:
    own = {
        (trials[place].size, trials[place].beside): (trials[place], times)
        for place, times in measured.items()
        if trials[place].name == name
    }
    return [
        Exchange(
            size=size,
            seconds=statistics.median(times.seconds),
            quartiles=_quartiles(times.seconds),
            cpu_seconds=times.cpu,
            repeats=len(times.seconds),
            bytes_sent=trial.bytes_sent,
            relative_error=trial.relative_error or 0.0,
            beside=_beside(own.get((size, True))),
        )
        for (size, beside), (trial, times) in own.items()
        if not beside
    ]


def _beside(measured: tuple[Trial, _Times] | None) -> Beside | None:
    if measured is None:
        return None
    _, times = measured
    seconds = statistics.median(times.seconds)
    return Beside(seconds, min(max(times.lost, 0.0), seconds), len(times.seconds))


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high
