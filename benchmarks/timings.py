"""Summaries of the ranks' measurements."""

from __future__ import annotations

import statistics
from typing import Any


def slowest(ranks: list[dict[str, list[float]]]) -> dict[str, Any]:
    """Return median and quartiles of the slowest rank's times, in ms."""
    summary = {}
    for name in ranks[0]:
        times = [1e3 * max(repeat) for repeat in zip(*(rank[name] for rank in ranks), strict=True)]
        low, median, high = statistics.quantiles(times, n=4)
        summary[name] = {"median_ms": round(median, 2), "quartiles_ms": [round(low, 2), round(high, 2)]}
    return summary
