"""Times between measured bucket sizes."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["interpolated"]


def interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Return the value at ``at``, on straight lines through measured points.

    Outside of them the nearest line continues, but never below zero: a time that grows with the size is not
    negative for a small one. A single point means proportionality.

    Args:
        points: (size, value), by rising size; at least one.
        at: The size.
    """
    if len(points) == 1:
        ((size, value),) = points
        return value * at / size
    segment = 0
    while segment < len(points) - 2 and at > points[segment + 1][0]:
        segment += 1
    (left, low), (right, high) = points[segment : segment + 2]
    return max(0.0, low + (high - low) * (at - left) / (right - left))
