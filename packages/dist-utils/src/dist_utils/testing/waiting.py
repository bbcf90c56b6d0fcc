"""Timeouts for operations that take a known time on an idle machine."""

from __future__ import annotations

import math
import os
import time

__all__ = ["MOST_PATIENCE", "patience"]

MOST_PATIENCE = 30.0
"""The largest factor by which ``patience`` extends a timeout."""

_SAMPLE_SECONDS = 0.05
"""How long ``patience`` computes: several turns of the scheduler."""


def patience(seconds: float) -> float:
    """Return a timeout, on a machine that may be busy, for what takes less than ``seconds`` on an idle one.

    ``seconds``, times the number of processes that want each core: the system's average of the last minute,
    or what a short computation of the caller shows, whichever is larger. For timeouts that a test waits out:
    they should be short, but must not end a collective only because a rank had to wait for a core.

    Args:
        seconds: The time without other work.

    Returns:
        ``seconds`` on an idle machine; at most 30 times as much. Rounded up to half a second, so that it is
        the same in milliseconds everywhere.

    Cost:
        A twentieth of a second.

    Example:
        >>> run_ranks(peer_stops, 3, may_die={1}, group_timeout=patience(2.0))  # doctest: +SKIP
    """
    began, computed = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - began) < _SAMPLE_SECONDS:
        pass
    computed = time.thread_time() - computed
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    factor = min(max(load, passed / max(computed, 1e-3), 1.0), MOST_PATIENCE)
    return math.ceil(2 * seconds * factor) / 2
