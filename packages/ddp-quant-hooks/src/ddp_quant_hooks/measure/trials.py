"""Every hook on buckets of several sizes, alone and beside computation, within a budget."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from ddp_quant_hooks.auto.candidates import Candidate, default_candidates
from ddp_quant_hooks.lowrank.hook import low_rank_hook
from ddp_quant_hooks.lowrank.state import LowRankState
from ddp_quant_hooks.measure.links import Ranks, synchronize
from ddp_quant_hooks.statistics import bytes_around_ring

Progress = Callable[[float, str], None]
"""Called with the share of the work that is done and a text about what comes next."""

_REPEATS = 20
_ALONE = 0.03
_SIDE = 512
"""Of the parameters, which are square."""
_BLOCK = _SIDE * _SIDE
"""Random values for each rank: 1 MiB of fp32. Buckets repeat them."""


@dataclass(frozen=True)
class Exchange:
    """The times of an average of one bucket; medians of the slowest rank.

    Attributes:
        size: The size of the bucket, in bytes.
        seconds: Until the average is there, when nothing else is computed.
        quartiles: The lower and upper quartile of ``seconds``.
        cpu_seconds: Processor time of a rank; 0 with an accelerator, for which the processor only waits.
        seconds_beside: Until the average is there, while every rank computes.
        seconds_lost: By how much longer that computation takes than alone.
        repeats: How often all this was measured.
        bytes_sent: Payload that a rank sends; of the rank that sends most.
        bytes_on_host_link: Payload that the ranks of a host send to other hosts; of the busiest host.
        relative_error: The relative error of the first average of normal values, in the L2 norm.
    """

    size: int
    seconds: float
    quartiles: tuple[float, float]
    cpu_seconds: float
    seconds_beside: float
    seconds_lost: float
    repeats: int
    bytes_sent: int
    bytes_on_host_link: int
    relative_error: float


Hooks = dict[str, list[Exchange]]
"""By the name of the hook, from exact to few bytes; by rising size, alike for all hooks."""


def measure_hooks(
    ranks: Ranks, sizes: Sequence[int], budget: float, progress: Progress
) -> tuple[Hooks, float]:
    """Measure every hook on buckets of every size as often as a budget allows.

    First each runs once, small buckets first; a size that would not fit, judging by the previous one, is left
    out with all larger ones. Then it is always the turn of the trial that has taken the least time so far,
    until each has run 20 times more.

    Args:
        ranks: The ranks that average.
        sizes: Of buckets, in bytes, by rising size. The first is tried whatever the budget.
        budget: Seconds for all of it.
        progress: Called before each run.

    Returns:
        The hooks, and the seconds that copying a byte of a gradient takes; identical on all ranks.
    """
    runner, hooks = _Runner(ranks, max(sizes)), default_candidates(ranks.group)
    hooks["low rank"] = Candidate(LowRankState(ranks.group, warm_up_steps=0), low_rank_hook)
    trials: list[_Trial] = []
    left = budget

    def run_once(trial: _Trial) -> float:
        progress(min(1.0, 1 - left / budget), f"{trial.name}, {trial.size / 2**20:g} MiB")
        runner.run(trial)
        return trial.costs[-1]

    try:
        for size in sizes:
            if sum(trial.costs[0] * size / trial.size for trial in trials[-len(hooks) :]) > left:
                break
            trials += [_Trial(name, hook, runner.memory[: size // 4]) for name, hook in hooks.items()]
            for trial in trials[-len(hooks) :]:
                left -= run_once(trial)
        while due := [one for one in trials if len(one.runs) <= _REPEATS and one.costs[-1] <= left]:
            left -= run_once(min(due, key=lambda trial: sum(trial.costs)))
    finally:
        for hook in hooks.values():
            hook.close()
    found = {name: [trial.result() for trial in trials if trial.name == name] for name in hooks}
    return found, statistics.median(runner.copying)


@dataclass
class _Trial:
    """One hook on buckets of one size, and what its runs took."""

    name: str
    candidate: Candidate
    buffer: torch.Tensor
    runs: list[Exchange] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.size, self.bucket = self.buffer.nbytes, _bucket(self.buffer)

    def result(self) -> Exchange:
        """Return the medians. The first run warms up, and counts only if there was no other."""
        counting = self.runs[1:] or self.runs
        times = ("seconds", "cpu_seconds", "seconds_beside", "seconds_lost")
        medians = {name: statistics.median(getattr(run, name) for run in counting) for name in times}
        ordered, quarter = sorted(run.seconds for run in counting), len(counting) // 4
        quartiles = ordered[quarter], ordered[-1 - quarter]
        medians["seconds_lost"] = min(max(medians["seconds_lost"], 0.0), medians["seconds_beside"])
        return replace(self.runs[0], quartiles=quartiles, repeats=len(counting), **medians)


class _Runner:
    """Runs trials on all ranks together.

    Args:
        ranks: The ranks that average.
        largest: Bytes of the largest bucket.

    Attributes:
        memory: For the values of every bucket.
        copying: The seconds for copying a byte, of every run.
    """

    def __init__(self, ranks: Ranks, largest: int) -> None:
        self._ranks, self._device = ranks, ranks.device
        self._own = _normal(_BLOCK, ranks.group.rank()).to(self._device)
        total = torch.zeros(_BLOCK, dtype=torch.float64, device="cpu")
        for rank in range(len(ranks.hosts)):
            total += _normal(_BLOCK, rank)
        self._mean = (total / len(ranks.hosts)).to(self._device)
        self.memory = self._own.repeat(-(-largest // self._own.nbytes))
        self._computation = _Computation(self._device)
        self.copying: list[float] = []

    def run(self, trial: _Trial) -> None:
        """Average a bucket of normal values, different on every rank: alone, then beside computation."""
        began, counting = time.perf_counter(), trial.candidate.averaging
        before = None if counting is None else counting.statistics
        seconds, copying, cpu, _ = self._average(trial)
        error = float((trial.buffer[:_BLOCK] - self._mean).norm() / self._mean.norm())
        if counting is None or before is None:
            sent, to_hosts = self._bytes_around_ring(trial)
        else:
            done = counting.statistics - before
            sent, to_hosts = done.bytes_sent, done.bytes_between_hosts
        unit = self._computation.seconds_alone()
        beside, _, _, units = self._average(trial, self._computation)
        of_ranks = [0.0] * len(self._ranks.hosts)
        of_ranks[self._ranks.group.rank()] = to_hosts
        cost, lost = time.perf_counter() - began, beside - unit * units
        cost, copying, seconds, cpu, beside, lost, sent, error, *of_ranks = self._ranks.largest(
            [cost, copying, seconds, cpu, beside, lost, sent, error, *of_ranks]
        )
        links = Counter[int]()
        for host, nbytes in zip(self._ranks.hosts, of_ranks, strict=True):
            links[host] += int(nbytes)
        busiest, spread = max(links.values()), (seconds, seconds)
        trial.runs.append(
            Exchange(trial.size, seconds, spread, cpu, beside, lost, 1, int(sent), busiest, error)
        )
        trial.costs.append(cost)
        self.copying.append(copying / trial.size)

    def _average(
        self, trial: _Trial, computation: _Computation | None = None
    ) -> tuple[float, float, float, int]:
        """Return the seconds of an average, of a copy, and of the processor; and units computed meanwhile."""
        began = time.perf_counter()
        trial.buffer.view(-1, _BLOCK).copy_(self._own)
        synchronize(self._device)
        copying, units = time.perf_counter() - began, 0
        self._ranks.largest([0.0])  # begin together
        began, cpu_began = time.perf_counter(), time.process_time()
        future = trial.candidate.hook(trial.candidate.state, trial.bucket)
        if computation is not None:
            is_done = self._watch(future)
            while not is_done():
                computation.run_unit()
                units += 1
        future.wait()
        synchronize(self._device)
        cpu = time.process_time() - cpu_began if self._device.type == "cpu" else 0.0
        return time.perf_counter() - began, copying, cpu, units

    def _watch(self, future: torch.futures.Future[Any]) -> Callable[[], bool]:
        """Return a function that tells whether an average is there."""
        if self._ranks.on_host:
            return future.done
        module = torch.get_device_module(self._device)
        stream, event = module.Stream(self._device), module.Event()
        with module.stream(stream):
            future.wait()  # on an accelerator the stream waits, not the host
            event.record()
        query: Callable[[], bool] = event.query
        return query

    def _bytes_around_ring(self, trial: _Trial) -> tuple[float, float]:
        """Return how many bytes this rank has sent in a ring, and how many of them to another host."""
        hosts, rank = self._ranks.hosts, self._ranks.group.rank()
        ring = list(range(len(hosts)))
        if not self._ranks.on_host:  # NCCL's ring enters every host once
            ring.sort(key=hosts.__getitem__)
        nbytes = int(trial.size * trial.candidate.share_of_bytes)
        return bytes_around_ring(nbytes, ring, hosts, rank)


def _bucket(buffer: torch.Tensor) -> Any:
    """Return what hooks use of DDP's buckets, with square parameters, whose gradients are its parts.

    Torch makes real ones only in a backward pass of a model, which would be broadcast first.
    """
    gradients = [part.view(_SIDE, _SIDE) for part in torch.split(buffer, _SIDE * _SIDE)]
    parameters = [*map(torch.nn.Parameter, gradients)]  # take no memory; hooks know a bucket by them
    return SimpleNamespace(
        index=lambda: 0,
        is_last=lambda: True,
        buffer=lambda: buffer,
        gradients=lambda: gradients,
        parameters=lambda: parameters,
    )


class _Computation:
    """Matrix products that stand in for a model's: each takes a small part of a bucket's time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seconds, self._units = device, 0.0, 0
        self._weights = (_normal(512 * 512, 0) / 512**0.5).view(512, 512).to(device)
        self._input = _normal(512, 1).to(device).repeat(128 if device.type == "cpu" else 1 << 15, 1)
        self._output = torch.empty_like(self._input)

    def run_unit(self) -> None:
        torch.mm(self._input, self._weights, out=self._output)
        if self._device.type != "cpu":  # not the streams of an average beside it
            torch.get_device_module(self._device).current_stream(self._device).synchronize()

    def seconds_alone(self) -> float:
        """Return the mean seconds of a unit beside nothing, of this moment and those before."""
        began = time.perf_counter()
        while (seconds := time.perf_counter() - began) < _ALONE:
            self.run_unit()
            self._units += 1
        self._seconds += seconds
        return self._seconds / self._units


def _normal(count: int, seed: int) -> torch.Tensor:
    """Return normal values; the caller's random numbers stay as they are."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
