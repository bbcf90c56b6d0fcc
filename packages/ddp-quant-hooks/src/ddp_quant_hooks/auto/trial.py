"""The trial: candidates in turns, backward pass by backward pass, until one is chosen.

What happens in a pass depends only on the count of passes and on numbers that all ranks have exchanged. So
every rank makes the same choice, in the same pass.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import relative_error
from ddp_quant_hooks.exchange.values import flat_real
from dist_utils import OrderedWorker
from dist_utils.comm_hooks import Mark, joined_future
from dist_utils.process_groups import all_gather_plain, collective_device

_WARM_UP = 3
"""Passes before the first turn: DDP rebuilds its buckets after the first one (the second, with a static
graph)."""

_TIMED = 3
"""Timed passes of a turn. An untimed one precedes them, in which anything new is made, compared and
sampled, and numbers are exchanged."""

_ROUNDS = 3
"""Timed rounds, in each of which every candidate has a turn, in alternating order. A busy moment may slow
down one candidate's whole turn, but hardly two of three."""

_FOLLOWING = 2
"""Passes with the fastest candidate before the choice. When they are over, no rank is in an exchange with
another candidate, and those can be closed."""

_GAIN = 1.02
"""A candidate that sends fewer bytes must be faster by this factor: less is within the noise."""

Round: TypeAlias = Mapping[str, float]
"""The seconds of a step with each candidate in one round of turns."""


@dataclass(frozen=True)
class Choice:
    """The choice that the ranks have agreed on.

    Attributes:
        candidate: The candidate that averages all buckets.
        seconds: Seconds of a whole step with each candidate that was timed.
        errors: The largest relative error that was measured for each candidate.
        why: The text that was logged about the choice.
    """

    candidate: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


class TrialPass:
    """One backward pass of a trial. Holds no state and no group, as callbacks of exchanges write into it.

    Args:
        candidate: Which candidate averages its buckets.
        sampled: The place of the bucket whose error is measured, if one is.

    Attributes:
        sizes: The bytes of its buckets so far, in their order; 0 for a sparse one.
    """

    def __init__(self, candidate: str, sampled: int | None = None) -> None:
        self.candidate = candidate
        self.sampled = sampled
        self.sizes: list[int] = []
        self._exact: torch.Tensor | None = None
        self._error: torch.Tensor | None = None

    def average(
        self, worker: OrderedWorker, buffer: torch.Tensor, average: Callable[[], torch.futures.Future[Any]]
    ) -> torch.futures.Future[Any]:
        """Average the next bucket; if it is the sampled one, measure its error by an exact all-reduce.

        Args:
            worker: For the all-reduce.
            buffer: The buffer of the bucket.
            average: Averages it, in place or not.

        Returns:
            A future of what ``average`` gives, when the error is known.
        """
        self.sizes.append(0 if buffer.is_sparse else buffer.nbytes)
        if self.sampled != len(self.sizes) - 1 or not self.sizes[-1]:
            return average()
        values = flat_real(buffer)
        exact = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        exact.div_(worker.process_group.size())  # first, so that the sum stays finite
        self._exact = exact  # alive until the error is read: an accelerator may be far behind

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            dist.all_reduce(exact, group=group)
            return exact

        summed = worker.submit(job, device=buffer.device, name="auto_hook:exact_mean")
        averaged = average()
        both = joined_future([summed, averaged], averaged, buffer.device)
        return both.then(partial(self._compare, exact))

    def _compare(self, exact: torch.Tensor, both: torch.futures.Future[torch.futures.Future[Any]]) -> Any:
        """Note the error of an average, when it and the exact one are there; return what the hook gave."""
        averaged = both.value().value()
        mean = averaged[0] if isinstance(averaged, (list, tuple)) else averaged
        known = exact.isfinite().all()
        error = relative_error(flat_real(mean.contiguous()).to(exact.dtype, copy=True), exact)
        self._error = torch.where(known, error.nan_to_num(nan=math.inf), math.nan)
        return averaged

    def read_error(self) -> float | None:
        """Return the error, once the pass is over; ``None`` if the exact mean is not finite."""
        error = math.nan if self._error is None else self._error.item()
        return None if math.isnan(error) else error


def largest_of_ranks(worker: OrderedWorker, *own: Mapping[str, float]) -> list[dict[str, float]]:
    """Return tables with the largest of each number over all ranks. Waits for them.

    Args:
        worker: For the exchange.
        own: Tables of numbers of this rank; with the same names on all ranks.
    """
    everyone: list[list[dict[str, float]]] = []

    def job(group: dist.ProcessGroup) -> None:
        everyone.extend(all_gather_plain(group, own))

    device = collective_device(worker.process_group)
    worker.submit(job, device=device, name="auto_hook:largest_of_ranks").wait()
    return [
        {name: max(one[name] for one in tables if name in one) for name in tables[0]}
        for tables in zip(*everyone, strict=True)
    ]


class Trial:
    """Tries candidates in turns.

    Args:
        names: The names of the candidates, the most exact one first.
        max_error: Candidates of a larger error are left out; ``None``: errors are not measured.
        left_out: Why some candidates are not tried, by name.
    """

    _began: Mark
    _worker: OrderedWorker

    def __init__(self, names: Sequence[str], max_error: float | None, left_out: Mapping[str, str]) -> None:
        self._names = list(names)
        self._max_error = max_error
        self._left_out = dict(left_out)
        self._errors: dict[str, float] = {}
        self._rounds: list[Round] = []
        self._passes = 0
        self._schedule = self._run()

    def next_pass(self, began: Mark, worker: OrderedWorker) -> TrialPass | Choice:
        """Return the pass that begins now or, with the first pass after the trial, the choice.

        Args:
            began: When it begins, and with it the last pass has ended.
            worker: For exchanges of numbers between the ranks.
        """
        self._began, self._worker = began, worker
        try:
            return next(self._schedule)
        finally:
            del self._worker  # a generator of a method is a cycle: the worker would not end with its state

    def _run(self) -> Iterator[TrialPass | Choice]:
        left = self._within_limit(self._names, at_end=False)
        if len(left) > 1:
            warm_up = [self._pass(left[0]) for _ in range(_WARM_UP)]
            yield from warm_up
            for number in range(1 + _ROUNDS):  # the first one sets up each candidate, and finds its error
                yield from self._round(left, number, warm_up[-1].sizes)
                left = self._within_limit(left, at_end=number == _ROUNDS)
                if len(left) == 1:
                    break
        name, seconds = fastest(left, self._rounds), typical_seconds(self._rounds)
        for _ in range(_FOLLOWING):
            yield self._pass(name)
        why = reasons(name, seconds, self._errors, self._left_out, self._passes)
        yield Choice(name, seconds, self._errors, why)

    def _pass(self, name: str, sampled: int | None = None) -> TrialPass:
        self._passes += 1
        return TrialPass(name, sampled)

    def _round(self, names: Sequence[str], number: int, sizes: Sequence[int]) -> Iterator[TrialPass]:
        """Give each candidate a turn; then, as the next pass begins, exchange what the turns have shown."""
        turns: dict[str, tuple[TrialPass, list[Mark]]] = {}
        for name in names if number % 2 else reversed(names):
            first = self._pass(name, self._sample_of(number, sizes))
            yield first
            marks = [self._began]
            for _ in range(_TIMED if number else 0):
                yield self._pass(name)
                marks.append(self._began)
            turns[name] = first, marks
        errors = {name: error for name in names if (error := turns[name][0].read_error()) is not None}
        seconds = {name: _step(turns[name][1]) for name in names} if number else {}
        errors, seconds = largest_of_ranks(self._worker, errors, seconds)
        self._errors |= {name: max(error, self._errors.get(name, 0.0)) for name, error in errors.items()}
        if number:
            self._rounds.append(seconds)

    def _sample_of(self, number: int, sizes: Sequence[int]) -> int | None:
        """Return which bucket is sampled in a round: the largest one, then the next; never a sparse one."""
        dense = sorted((place for place, size in enumerate(sizes) if size), key=lambda place: -sizes[place])
        return dense[number % len(dense)] if dense and self._max_error is not None else None

    def _within_limit(self, names: list[str], *, at_end: bool) -> list[str]:
        """Leave out candidates whose error is too large or, at the end, not known: no sample was finite."""
        if self._max_error is None:
            return names
        for name in names:
            error = self._errors.get(name)
            if error is not None and error > self._max_error:
                self._left_out[name] = f"its error {error:.2g} is larger than max_error {self._max_error:.2g}"
            elif error is None and at_end:
                self._left_out[name] = "no finite sample has shown its error"
        left = [name for name in names if name not in self._left_out]
        if not left:
            left = [min(self._names, key=lambda name: self._errors.get(name, math.inf))]
            del self._left_out[left[0]]
            self._left_out[f"all but {left[0]}"] = "nothing is known to be within max_error"
        return left


def _step(marks: Sequence[Mark]) -> float:
    """Return the seconds of a typical step, of the points in time between steps."""
    return statistics.median(end.seconds_since(begin) for begin, end in itertools.pairwise(marks))


# ---- conclusions: functions of numbers that are identical on all ranks ----


def typical_seconds(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the seconds of a typical step with each candidate, as if all rounds had been the median one.

    A candidate is compared with the fastest one in each round, so a slow period of the whole machine or
    network does not count, even if some candidates had no turn in it.
    """
    least = [min(one.values()) for one in rounds]
    usual = statistics.median(least) if least else 0.0
    ratios: dict[str, list[float]] = {}
    for one, fastest_one in zip(rounds, least, strict=True):
        for name, seconds in one.items():
            ratios.setdefault(name, []).append(seconds / fastest_one)
    return {name: usual * statistics.median(found) for name, found in ratios.items()}


def fastest(names: Sequence[str], rounds: Sequence[Round]) -> str:
    """Return the first candidate that no other beats by more than the noise.

    Args:
        names: The candidates, the most exact one first.
        rounds: All rounds.
    """
    seconds = typical_seconds(rounds)
    timed = [name for name in names if name in seconds]
    least = min((seconds[name] for name in timed), default=0.0)
    return next((name for name in timed if seconds[name] <= _GAIN * least), names[0])


def reasons(
    name: str,
    seconds: Mapping[str, float],
    errors: Mapping[str, float],
    left_out: Mapping[str, str],
    passes: int,
) -> str:
    """Return a choice and its reasons as a line for the log."""
    parts = [f"{name} for all buckets, after {passes} backward passes"]
    if seconds:
        in_order = sorted(seconds, key=lambda one: seconds[one])
        steps = ", ".join(f"{1e3 * seconds[one]:.1f} ms with {one}" for one in in_order)
        parts.append(f"a whole step took {steps}")
    if errors:
        parts.append("relative errors " + ", ".join(f"{error:.2g} of {one}" for one, error in errors.items()))
    parts += [f"{one} was left out: {reason}" for one, reason in left_out.items()]
    return "; ".join(parts)
