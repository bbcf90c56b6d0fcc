"""Waits for ranks that did not come: a backward pass has one at most."""

from __future__ import annotations

from dist_utils import torch_compat

__all__ = ["earlier_vain_wait", "note_vain_wait"]

_vain: dict[int, str] = {}
"""What came of the first wait in vain of the last backward pass that had one, by the number of that pass."""


def note_vain_wait(error: str) -> None:
    """Note that ranks did not come in the backward pass that this thread runs, if it runs one.

    Args:
        error: What came of it.
    """
    task = torch_compat.graph_task_id()
    if task != -1 and task not in _vain:
        _vain.clear()
        _vain[task] = error


def earlier_vain_wait() -> str:
    """Return why this backward pass waits for no rank any more, as the end of a message; or nothing.

    It will raise, but some of its errors only when it ends: what DDP waits for is in futures. Until then
    communication hooks go on, an overlapped step among them, and each would wait for the same ranks until the
    timeout, one after another. The next pass is a new attempt, and so is what is called outside of any.
    """
    error = _vain.get(torch_compat.graph_task_id(), "")
    return error and f"ranks are not waited for again in this backward pass; before, {error}"
