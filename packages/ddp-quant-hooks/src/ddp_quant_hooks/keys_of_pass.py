"""Keys of modules that may be used several times in one backward pass."""

from __future__ import annotations

from collections import Counter

from dist_utils import torch_compat

__all__ = ["KeysOfPass"]


class KeysOfPass:
    """Gives each use of a module in a backward pass a key of its own, the same in every pass."""

    def __init__(self) -> None:
        self._uses: Counter[str] = Counter()
        self._latest = -1

    def next(self, key: str) -> str:
        """Return the key of a module's next use: ``key``, then ``key#2``, ``key#3``."""
        task = torch_compat.graph_task_id()
        if task == -1:  # each is a step of its own
            return key
        if task > self._latest:  # else it is the pass around those that were seen before
            self._latest = task
            if not torch_compat.inside_nested_backward():
                self._uses.clear()
            else:  # as reentrant checkpoints make them
                torch_compat.after_surrounding_backward(self._uses.clear)
        self._uses[key] += 1
        return key if self._uses[key] == 1 else f"{key}#{self._uses[key]}"
