"""The trial: candidates in turns, backward pass by backward pass, until one is chosen.

What happens in a pass depends only on the count of passes and on numbers that all ranks have agreed on. So
every rank makes the same choice, in the same pass.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Iterator, Sequence
from typing import Protocol

from ddp_quant_hooks.auto_choice import (
    Assignment,
    Choice,
    another_round_helps,
    best_by_size,
    clearly_slower,
    fastest,
    log_line,
    typical_steps,
)
from ddp_quant_hooks.auto_errors import ErrorSample
from ddp_quant_hooks.auto_times import PassTimes

__all__ = ["PASSES_BEFORE_CHOICE", "Ranks", "Trial", "TrialPass", "least_passes"]

_WARM_UP = 3
"""Passes before the first turn: DDP rebuilds its buckets after the first one (the second, with a static
graph)."""

_TIMED = 3
"""Timed passes of a turn. An untimed one precedes them, in which anything new is made, compared and
sampled."""

_BETWEEN = 2
"""Passes after a round: one until an accelerator is past the last timed one, one to compare times."""

_ROUNDS = 4
"""Rounds in which every contender has a turn, in alternating order. More follow while the result is open and
passes are left."""

PASSES_BEFORE_CHOICE = 100
"""The default limit of a trial."""

_NOT_MEASURED = -math.inf


def least_passes(candidates: int) -> int:
    """Return how many passes a trial takes in which every candidate has one turn."""
    return _WARM_UP + candidates + _BETWEEN + _round_passes(candidates)


def _round_passes(contenders: int) -> int:
    return contenders * (1 + _TIMED) + _BETWEEN


class Largest(Protocol):
    """The largest of each number over all ranks, while it is being found."""

    def read(self) -> Sequence[float]:
        """Wait for the numbers and return them."""


class Ranks(Protocol):
    """The communication between ranks during a trial."""

    def agreed_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the bytes of the buckets of a pass, in their order, if all have the same."""

    def largest(self, values: Sequence[float]) -> Largest:
        """Start to find the largest of each number over all ranks."""


class TrialPass:
    """The candidates and measurements of one pass.

    Attributes:
        assignment: Which candidate averages what.
        timed: Whether its times count.
        sampled: The place of the bucket whose error is measured, if one is.
        times: The times of the pass.
        error: The error of the sampled bucket.
    """

    def __init__(self, assignment: Assignment, *, timed: bool = False, sampled: int | None = None) -> None:
        self.assignment = assignment
        self.timed = timed
        self.sampled = sampled
        self.times = PassTimes()
        self.error = ErrorSample()


class Trial:
    """Tries candidates in turns.

    Args:
        names: The names of the candidates, the most exact one first.
        meanwhile: What averages before the first turn.
        max_error: Candidates of a larger error are left out; ``None``: errors are not measured.
        most_passes: The number of passes after which a choice must be made.
        ranks: The communication between the ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        meanwhile: Assignment,
        max_error: float | None,
        most_passes: int,
        ranks: Ranks,
    ) -> None:
        self._names = list(names)
        self._meanwhile = meanwhile
        self._max_error = max_error
        self._most_passes = most_passes
        self._ranks = ranks
        self._sizes: Sequence[int] = []
        self._passes = 0
        self._steps: list[dict[Assignment, list[float]]] = []
        self._services: dict[str, dict[int, list[float]]] = {}
        self._errors: dict[str, float] = {}
        self._left_out: dict[str, str] = {}

    def run(self) -> Generator[TrialPass, Sequence[int], Choice]:
        """Yield each pass as it begins, and return the choice when the first pass after the trial begins.

        The caller sends the bytes of the buckets of the last pass.
        """
        uniform = [Assignment(name) for name in self._names]
        if len(uniform) == 1:
            return self._choice(uniform[0])
        sizes: Sequence[int] = []
        for _ in range(_WARM_UP):
            sizes = yield self._pass(self._meanwhile)
        self._sizes = self._ranks.agreed_sizes(sizes)
        yield from self._round(uniform, timed=0)  # also sets up each one, and finds too large errors
        contenders = self._without_too_large_errors(uniform)
        while len(contenders) > 1 and self._another_round(contenders):
            yield from self._round(contenders, timed=_TIMED)
            contenders = self._without_too_large_errors(contenders)
            far = clearly_slower(contenders, self._steps)
            contenders = [contender for contender in contenders if contender not in far]
            if len(self._steps) == 2:  # one timed round: now sizes can be compared
                contenders = self._with_mix(contenders)
        return self._choice(fastest(self._with_known_errors(contenders), self._steps))

    def _pass(self, assignment: Assignment, *, timed: bool = False, sampled: int | None = None) -> TrialPass:
        self._passes += 1
        return TrialPass(assignment, timed=timed, sampled=sampled)

    def _another_round(self, contenders: Sequence[Assignment]) -> bool:
        wanted = len(self._steps) - 1 < _ROUNDS or another_round_helps(contenders, self._steps)
        return wanted and self._passes + _round_passes(len(contenders)) <= self._most_passes

    def _round(
        self, contenders: Sequence[Assignment], *, timed: int
    ) -> Generator[TrialPass, Sequence[int], None]:
        number = len(self._steps)
        in_order = list(contenders) if number % 2 else list(reversed(contenders))
        turns: dict[Assignment, list[TrialPass]] = {}
        for contender in in_order:
            first = self._pass(contender, sampled=None if contender.by_size else self._sampled_in(number))
            yield first
            turns[contender] = [first]
            for _ in range(timed):
                turns[contender].append(one := self._pass(contender, timed=True))
                yield one
        yield self._pass(in_order[-1])
        largest = self._ranks.largest(self._measured(contenders, turns, timed))
        yield self._pass(in_order[-1])
        self._note(contenders, timed, iter(largest.read()))

    def _sampled_in(self, number: int) -> int | None:
        """Return which bucket is sampled in a round: the largest one, then the next; never a sparse one."""
        dense = [place for place, size in enumerate(self._sizes) if size]
        if self._max_error is None or not dense:
            return None
        by_size = sorted(dense, key=lambda place: -self._sizes[place])
        return by_size[number % len(by_size)]

    def _measured(
        self, contenders: Sequence[Assignment], turns: dict[Assignment, list[TrialPass]], timed: int
    ) -> list[float]:
        """Return this rank's numbers of a round. Of each, the largest over all ranks counts.

        The times of single exchanges are negated, so that those of the rank that came last count: the times
        of the others include their wait for it.
        """
        values: list[float] = []
        for contender in contenders:
            first, *others = turns[contender]
            error = first.error.read()
            values.append(_NOT_MEASURED if error is None else error)
            values += [_known(one.times.seconds) for one in others]
            if timed and not contender.by_size:
                services = [one.times.services() for one in others]
                for size in self._distinct_sizes:
                    seconds = [service[size] for service in services if size in service]
                    values.append(-statistics.median(seconds) if seconds else _NOT_MEASURED)
        return values

    def _note(self, contenders: Sequence[Assignment], timed: int, values: Iterator[float]) -> None:
        """Record all ranks' numbers of a round, in the order of :meth:`_measured`."""
        steps: dict[Assignment, list[float]] = {}
        for contender in contenders:
            error = next(values)
            if error >= 0:
                self._errors[contender.name] = max(error, self._errors.get(contender.name, 0.0))
            steps[contender] = [seconds for _ in range(timed) if (seconds := next(values)) > 0]
            if timed and not contender.by_size:
                measured = self._services.setdefault(contender.default, {})
                for size in self._distinct_sizes:
                    if (negative := next(values)) != _NOT_MEASURED:
                        measured.setdefault(size, []).append(-negative)
        self._steps.append(steps)

    @property
    def _distinct_sizes(self) -> list[int]:
        return sorted(set(self._sizes))

    def _without_too_large_errors(self, contenders: list[Assignment]) -> list[Assignment]:
        limit = self._max_error
        if limit is None:
            return contenders
        for name, error in self._errors.items():
            if error > limit:
                self._left_out[name] = f"its error {error:.2g} is larger than max_error {limit:.2g}"
        left = [one for one in contenders if not one.names & self._left_out.keys()]
        return left or [self._closest()]

    def _with_known_errors(self, contenders: list[Assignment]) -> list[Assignment]:
        """Leave out contenders without a measured error: none of their samples had finite gradients."""
        if self._max_error is None:
            return contenders
        known = [one for one in contenders if one.names <= self._errors.keys()]
        for one in contenders:
            if one not in known and not one.by_size:
                self._left_out[one.name] = "no finite sample has shown its error"
        return known or [self._closest()]

    def _closest(self) -> Assignment:
        """Return the candidate with the smallest known error, or else the most exact one."""
        closest = min(self._errors, key=lambda name: self._errors[name], default=self._names[0])
        self._left_out.pop(closest, None)
        why = f"{closest} has the smallest error" if self._errors else "no finite sample has shown any error"
        self._left_out[f"all but {closest}"] = f"nothing is known to be within max_error, and {why}"
        return Assignment(closest)

    def _with_mix(self, contenders: list[Assignment]) -> list[Assignment]:
        """Return the contenders and, if there is time to try it, the best candidate for each size."""
        names = [name for name in self._names if name not in self._left_out]
        mix = best_by_size(names, self._services)
        if mix is None or not self._another_round([*contenders, mix]):
            return contenders
        last = max(self._names.index(name) for name in mix.names)
        exact = [one for one in contenders if self._names.index(one.default) <= last]
        return [*exact, mix, *contenders[len(exact) :]]

    def _choice(self, chosen: Assignment) -> Choice:
        tried = dict.fromkeys(contender for one in self._steps for contender in one)
        typical = typical_steps(list(tried), self._steps)
        seconds = {contender.name: steps.seconds for contender, steps in typical.items()}
        why = log_line(chosen, seconds, self._errors, self._left_out, self._passes)
        return Choice(chosen.default, dict(chosen.by_size), seconds, dict(self._errors), why)


def _known(seconds: float | None) -> float:
    return _NOT_MEASURED if seconds is None else seconds
