"""Conclusions from the ranks' times: pure functions of numbers that are identical on all ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

__all__ = [
    "Assignment",
    "Choice",
    "Round",
    "Typical",
    "another_round_helps",
    "best_by_size",
    "clearly_slower",
    "fastest",
    "log_line",
    "typical_steps",
]

_LEAST_GAIN, _MOST_GAIN = 0.01, 0.02
"""The fraction by which a contender with fewer bytes must be faster: the noise, within these bounds."""

_SERVICE_GAIN = 0.1
"""The same for the exchange of one bucket: single exchanges are noisier than steps."""

_FAR, _LEAST_ROUNDS = 1.25, 2
"""A contender that takes this many times as long as the fastest one, in each of at least this many rounds,
gets no more turns. A busy moment may slow down one contender's whole turn, but hardly in two rounds."""

_MATTERS = 0.03
"""Contenders that are slower by a smaller fraction are as good."""

_SURE = 4.0
"""A contender is slower if it is so by this many standard errors. Few steps say little about their spread:
three were not enough."""

_MEDIAN_NOISE = 1.4826 * 1.2533
"""Converts the median absolute deviation of normal numbers to the standard error of their median, except for
the square root of their count."""


@dataclass(frozen=True)
class Assignment:
    """Which candidate averages which buckets.

    Attributes:
        default: The candidate for buckets of any other size.
        by_size: Pairs of bytes of a bucket and the name of its candidate.
    """

    default: str
    by_size: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "by size" if self.by_size else self.default

    @property
    def names(self) -> set[str]:
        """The candidates in use."""
        return {self.default, *(name for _, name in self.by_size)}

    def of(self, size: int) -> str:
        """Return the candidate for buckets of ``size`` bytes."""
        return dict(self.by_size).get(size, self.default) if self.by_size else self.default

    def part(self, name: str) -> tuple[bool, frozenset[int]]:
        """Return which buckets a candidate averages: with ``True`` all except these sizes, else these."""
        others = self.default == name
        return others, frozenset(size for size, here in self.by_size if (here == name) != others)


@dataclass(frozen=True)
class Choice:
    """The choice that the ranks have agreed on.

    Attributes:
        candidate: The candidate for buckets of any size that is not in ``by_size``.
        by_size: The names of candidates by bytes of a bucket; empty if one averages all.
        seconds: Seconds of a whole step for each candidate that was tried; ``"by size"`` stands for one
            candidate per size.
        errors: The largest relative error that was measured for each candidate.
        why: The text that was logged about the choice.
    """

    candidate: str
    by_size: Mapping[int, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def assignment(self) -> Assignment:
        """Which candidate averages which buckets."""
        return Assignment(self.candidate, tuple(sorted(self.by_size.items())))


Round: TypeAlias = Mapping[Assignment, Sequence[float]]
"""The seconds of each contender's timed steps in one round of turns."""


class Typical(NamedTuple):
    """A contender's typical step.

    Attributes:
        seconds: The median of its steps, as if every round had been like the median one.
        uncertainty: The standard error of that.
    """

    seconds: float
    uncertainty: float


def typical_steps(contenders: Sequence[Assignment], rounds: Iterable[Round]) -> dict[Assignment, Typical]:
    """Return the typical step of each contender that has timed steps.

    The slowness of a round is that of the least disturbed contender among those with turns in the most
    rounds. So a slow period of the whole machine or network does not count, even if some contenders had no
    turn in that round; nor does a busy moment that slowed only one contender.
    """
    rounds = list(rounds)
    turns = {contender: sum(bool(one.get(contender)) for one in rounds) for contender in contenders}
    always = [contender for contender in contenders if 0 < turns[contender] == max(turns.values())]
    timed = [one for one in rounds if always and all(one.get(contender) for contender in always)]
    if not timed:
        return {}
    usual = {
        contender: statistics.median(seconds for one in timed for seconds in one[contender])
        for contender in always
    }
    scales = [
        min(statistics.median(one[contender]) / (usual[contender] or 1.0) for contender in always)
        for one in timed
    ]
    usual_scale = statistics.median(scales)
    found = {}
    for contender in contenders:
        steps = [
            seconds * usual_scale / (scale or 1.0)
            for one, scale in zip(timed, scales, strict=True)
            for seconds in one.get(contender, ())
        ]
        if steps:
            center = statistics.median(steps)
            spread = statistics.median(abs(step - center) for step in steps)
            found[contender] = Typical(center, _MEDIAN_NOISE * spread / len(steps) ** 0.5)
    return found


def fastest(contenders: Sequence[Assignment], rounds: Iterable[Round]) -> Assignment:
    """Return the first contender that no other beats by more than the noise.

    Args:
        contenders: The most exact one first.
        rounds: All rounds.
    """
    typical = typical_steps(contenders, rounds)
    if not typical:
        return contenders[0]
    least = min(typical.values())
    for contender in contenders:
        if contender in typical:
            seconds, uncertainty = typical[contender]
            gain = 2 * (least.uncertainty + uncertainty) / (least.seconds or 1.0)
            if seconds <= least.seconds * (1 + min(max(gain, _LEAST_GAIN), _MOST_GAIN)):
                return contender
    raise AssertionError("the fastest one is not slower than itself")


def clearly_slower(contenders: Sequence[Assignment], rounds: Sequence[Round]) -> set[Assignment]:
    """Return the contenders that need not be tried again."""
    found = set()
    far: dict[Assignment, list[bool]] = {contender: [] for contender in contenders}
    for one in rounds:
        timed = [contender for contender in contenders if one.get(contender)]
        medians = {contender: statistics.median(one[contender]) for contender in timed}
        for contender, seconds in medians.items():
            far[contender].append(seconds > _FAR * min(medians.values()))
    typical = typical_steps(contenders, rounds)
    least = min(typical.values(), default=Typical(0.0, 0.0))
    for contender, step in typical.items():
        difference, uncertainty = step.seconds - least.seconds, _together(step, least)
        surely = difference > max(_MATTERS * least.seconds, _SURE * uncertainty)
        if len(far[contender]) >= _LEAST_ROUNDS and (surely or all(far[contender])):
            found.add(contender)
    return found


def another_round_helps(contenders: Sequence[Assignment], rounds: Sequence[Round]) -> bool:
    """Return whether some contender may be faster than the choice by more than a negligible difference."""
    typical = typical_steps(contenders, rounds)
    if not typical:
        return False
    chosen, least = typical[fastest(contenders, rounds)], min(typical.values())
    return any(
        chosen.seconds + 2 * _together(chosen, other) - other.seconds > _MATTERS * least.seconds
        for other in typical.values()
        if other is not chosen
    )


def _together(one: Typical, other: Typical) -> float:
    return math.hypot(one.uncertainty, other.uncertainty)


def best_by_size(
    names: Sequence[str], services: Mapping[str, Mapping[int, Sequence[float]]]
) -> Assignment | None:
    """Return for each size the candidate whose exchange is shortest; ``None`` if that is always the same.

    Args:
        names: The names of candidates, the most exact one first.
        services: Seconds, by candidate and bytes of a bucket.
    """
    chosen: dict[int, str] = {}
    for size in sorted({size for name in names for size in services.get(name, {})}):
        seconds = {
            name: statistics.median(measured)
            for name in names
            if (measured := services.get(name, {}).get(size))
        }
        least = min(seconds.values())
        chosen[size] = next(name for name in seconds if seconds[name] <= least * (1 + _SERVICE_GAIN))
    if len(set(chosen.values())) < 2:
        return None
    return Assignment(chosen[max(chosen)], tuple(chosen.items()))


def log_line(
    assignment: Assignment,
    seconds: Mapping[str, float],
    errors: Mapping[str, float],
    left_out: Mapping[str, str],
    passes: int,
) -> str:
    """Return a choice and its reasons as a line for the log."""
    if assignment.by_size:
        sizes = ", ".join(f"{name} for {_bytes(size)}" for size, name in assignment.by_size)
        what = f"{sizes}, {assignment.default} for buckets of other sizes"
    else:
        what = f"{assignment.default} for all buckets"
    parts = [f"{what}, after {passes} backward passes"]
    if seconds:
        in_order = sorted(seconds, key=lambda name: seconds[name])
        parts.append(
            "a whole step took " + ", ".join(f"{1e3 * seconds[n]:.1f} ms with {n}" for n in in_order)
        )
    if errors:
        parts.append("relative errors " + ", ".join(f"{error:.2g} of {n}" for n, error in errors.items()))
    parts += [f"{name} was left out: {reason}" for name, reason in left_out.items()]
    return "; ".join(parts)


def _bytes(size: int) -> str:
    if size == 0:
        return "sparse buckets"
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"
