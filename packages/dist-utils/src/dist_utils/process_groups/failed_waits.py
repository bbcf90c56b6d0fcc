"""Waits for ranks that did not come: a backward pass waits for each of them once at most."""

from __future__ import annotations

from collections.abc import Iterable

from dist_utils import torch_compat

__all__ = ["earlier_failed_wait", "note_failed_wait"]

_MOST_PASSES = 16
"""Threads may run several backward passes at a time."""

_failed: dict[int, dict[int, str]] = {}
"""By the number of a backward pass, the latest passes last: the ranks that did not come, and the errors."""


def note_failed_wait(missing: Iterable[int], error: str) -> None:
    """Note that ranks did not come in the backward pass that this thread runs, if it runs one.

    Args:
        missing: Their global ranks.
        error: The error.
    """
    task = torch_compat.graph_task_id()
    if task == -1:
        return
    noted = _failed.setdefault(task, {})
    for rank in missing:
        noted.setdefault(rank, error)
    for old in list(_failed)[:-_MOST_PASSES]:
        _failed.pop(old, None)


def earlier_failed_wait(ranks: Iterable[int]) -> str:
    """Return why this backward pass does not wait for these ranks, as the end of a message; or nothing.

    It will raise, but some of its errors only when it ends: what DDP waits for is in futures. Until then
    communication hooks go on, an overlapped step among them, and each would wait for the same ranks until the
    timeout, one after another. The next pass is a new attempt, and so is what is called outside of any.

    Groups without these ranks meet as always: their other ranks may know of no error, and would wait for this
    rank for nothing, or mistake its next pass for this one.

    Args:
        ranks: Global ranks, all of a group.
    """
    noted = _failed.get(torch_compat.graph_task_id(), {})
    error = next((noted[rank] for rank in ranks if rank in noted), "")
    return error and f"ranks are not waited for again in this backward pass; before, {error}"
