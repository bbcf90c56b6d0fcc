"""Decide whether a quantity grows: the slope of a regression line, and its error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Line", "fitted"]


class Line(NamedTuple):
    """A regression line through equidistant values.

    Args:
        growth: Growth from the first to the last value, along the line.
        error: Standard error of the growth.
        mean: Mean of the values.
    """

    growth: float
    error: float
    mean: float

    def is_flat(self, least: float = 0.0) -> bool:
        """Return whether the growth is zero within its error (three times), or less than ``least``."""
        return abs(self.growth) <= max(3 * self.error, least)


def fitted(values: Sequence[float]) -> Line:
    """Fit a line by least squares.

    Consecutive values resemble each other, which would make the error look small, so the line is fitted to
    the means of twenty blocks.
    """
    size = max(1, len(values) // 20)
    blocks = [sum(values[start : start + size]) / size for start in range(0, len(values) - size + 1, size)]
    count = len(blocks)
    mean, middle = sum(blocks) / count, (count - 1) / 2
    spread = sum((index - middle) ** 2 for index in range(count))
    slope = sum((index - middle) * (value - mean) for index, value in enumerate(blocks)) / spread
    rest = sum((value - mean - slope * (index - middle)) ** 2 for index, value in enumerate(blocks))
    error = math.sqrt(rest / max(1, count - 2) / spread)
    return Line(slope * (count - 1), error * (count - 1), mean)
