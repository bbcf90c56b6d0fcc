"""Keys of modules that may be used several times in one backward pass."""

from __future__ import annotations

from collections import Counter

from ddp_quant_hooks.tensor_steps import TensorStep
from dist_utils import torch_compat

__all__ = ["KeysOfPass"]


class KeysOfPass:
    """Gives each use of a module in a backward pass a key of its own, the same in every pass.

    Attributes:
        last_ended_well: Whether the pass before the current one ended well.
    """

    def __init__(self) -> None:
        self.last_ended_well = True
        self._uses: Counter[str] = Counter()
        self._pass: TensorStep | None = None

    def begin(self) -> bool:
        """Note a use of a module. Return whether that begins another pass.

        Passes inside a pass, which reentrant checkpoints make, belong to it.
        """
        task = torch_compat.graph_task_id()
        another = self._pass is None or not self._pass.takes(task)
        if self._pass is None or another:
            self.last_ended_well = self._pass is None or self._pass.complete
            self._pass = TensorStep()
            self._uses.clear()
        self._pass.add_call(task)
        return another

    def next(self, key: str) -> str:
        """Return the key of a module's next use in this pass: ``key``, then ``key#2``, ``key#3``."""
        self._uses[key] += 1
        return key if self._uses[key] == 1 else f"{key}#{self._uses[key]}"
