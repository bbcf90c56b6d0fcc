"""What the ranks' times say: pure functions of numbers that are the same on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Assignment", "Choice", "Round", "best_by_size", "clearly_slower", "fastest", "told"]

_LEAST_GAIN, _MOST_GAIN = 0.01, 0.02
"""By what part a contender of fewer bytes must be faster: more than the noise, within these bounds."""

_SERVICE_GAIN = 0.1
"""The same for the exchange of one bucket: times of single exchanges scatter more than those of steps."""

_FAR, _LEAST_ROUNDS = 1.25, 2
"""A contender that takes so many times as long as the fastest one, in each of so many rounds or more, gets no
more turns. A busy moment may last for a turn and slow one contender only, but hardly so in two rounds."""

_MEDIAN_NOISE = 1.4826 * 1.2533
"""From the median distance to the median of normal numbers to the standard error of their median, but for
the root of their count."""


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
        """What it is called in messages."""
        return "by size" if self.by_size else self.default

    @property
    def names(self) -> set[str]:
        """The candidates in use."""
        return {self.default, *(name for _, name in self.by_size)}

    def of(self, size: int) -> str:
        """Return the candidate for buckets of ``size`` bytes."""
        return dict(self.by_size).get(size, self.default) if self.by_size else self.default

    def part(self, name: str) -> tuple[bool, frozenset[int]]:
        """Return which buckets are a candidate's: all but these, or these."""
        others = self.default == name
        return others, frozenset(size for size, here in self.by_size if (here == name) != others)


@dataclass(frozen=True)
class Choice:
    """What the ranks have agreed on.

    Attributes:
        candidate: The candidate for buckets of any size that is not in ``by_size``.
        by_size: The names of candidates by bytes of a bucket; empty if one averages all.
        seconds: Of a whole step, by what was tried; ``"by size"`` is one candidate for each size.
        errors: The largest relative error that was measured of each candidate.
        why: All of that, as the log has it.
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
"""The seconds of each contender's timed steps, when all had their turns."""


def fastest(contenders: Sequence[Assignment], rounds: Iterable[Round]) -> Assignment:
    """Return the first contender that none is faster than by more than the noise.

    Args:
        contenders: The most exact one first.
        rounds: All of them. Those in which a contender is missing do not count.
    """
    centers = _centers(contenders, _with_all(contenders, rounds))
    quickest = min(centers, key=lambda contender: centers[contender][0])
    least, noise = centers[quickest]
    for contender in contenders:
        if contender in centers:
            center, own_noise = centers[contender]
            gain = min(max(2 * (noise + own_noise) / least, _LEAST_GAIN), _MOST_GAIN)
            if center <= least * (1 + gain):
                return contender
    return quickest


def clearly_slower(contenders: Sequence[Assignment], rounds: Iterable[Round]) -> set[Assignment]:
    """Return the contenders that need not be tried again."""
    far: dict[Assignment, list[bool]] = {contender: [] for contender in contenders}
    for one in rounds:
        timed = [contender for contender in contenders if one.get(contender)]
        medians = {contender: statistics.median(one[contender]) for contender in timed}
        for contender, seconds in medians.items():
            far[contender].append(seconds > _FAR * min(medians.values()))
    return {contender for contender, seen in far.items() if len(seen) >= _LEAST_ROUNDS and all(seen)}


def _with_all(contenders: Sequence[Assignment], rounds: Iterable[Round]) -> list[Round]:
    return [one for one in rounds if all(one.get(contender) for contender in contenders)]


def _centers(
    contenders: Sequence[Assignment], rounds: Sequence[Round]
) -> dict[Assignment, tuple[float, float]]:
    """Return the median of each contender's steps and its standard error, relative to their round.

    So what makes the whole machine or network slower for a while does not count.
    """
    together: dict[Assignment, list[float]] = {contender: [] for contender in contenders}
    for one in rounds:
        scale = statistics.median(seconds for contender in contenders for seconds in one[contender])
        for contender in contenders:
            together[contender] += [seconds / (scale or 1.0) for seconds in one[contender]]
    found = {}
    for contender, steps in together.items():
        if steps:
            center = statistics.median(steps)
            spread = statistics.median(abs(step - center) for step in steps)
            found[contender] = center, _MEDIAN_NOISE * spread / len(steps) ** 0.5
    return found or dict.fromkeys(contenders, (1.0, 0.0))


def best_by_size(
    names: Sequence[str], services: Mapping[str, Mapping[int, Sequence[float]]]
) -> Assignment | None:
    """Return for each size the candidate whose exchange is shortest; ``None`` if that is always the same.

    Args:
        names: Of candidates, the most exact one first.
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


def told(
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
