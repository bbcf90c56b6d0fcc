"""Conclusions from the ranks' times: pure functions of numbers that are identical on all ranks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

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
