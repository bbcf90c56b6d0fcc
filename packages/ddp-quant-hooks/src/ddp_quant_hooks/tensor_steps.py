"""One step of plain tensors: which calls belong to it, and whether it counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from ddp_quant_hooks.passes import BackwardPass, UnusedPart
from dist_utils import torch_compat

__all__ = ["TensorStep"]

T = TypeVar("T")

_OUTSIDE = -1


class TensorStep(BackwardPass):
    """A step whose tensors are told apart by keys.

    Args:
        explicit: It lasts until it is closed, and has failed if it never is. Otherwise it is one call, or
            all calls inside one ``backward()``.

    Attributes:
        open: It is explicit, and not closed.
    """

    def __init__(self, *, explicit: bool = False) -> None:
        super().__init__()
        self.open = explicit
        self._keys: set[str] = set()
        self._tensors = 0
        if explicit:
            self._ended_well[_OUTSIDE] = False

    def takes(self, task: int) -> bool:
        """Tell whether a call that comes now, inside autograd's ``task``, belongs to it."""
        if self.open or task == _OUTSIDE:
            return self.open
        # A pass inside of another one is of this step only until that other one has ended.
        return task in self._ended_well or (not self.complete and self.includes(task, self._tensors))

    def use(self, key: str) -> None:
        """Note that a call has this key.

        Raises:
            ValueError: Another one of this step has it.
        """
        if key in self._keys:
            raise ValueError(f"the key {key!r} was used in this step: what it lost would be added twice")
        self._keys.add(key)

    def add_tensors(self) -> int:
        """Note that tensors are averaged together, and return their number in the step."""
        number, self._tensors = self._tensors, self._tensors + 1
        self.add_bucket(_OUTSIDE if self.open else torch_compat.graph_task_id(), number)
        return number

    def close(self, *, ended_well: bool) -> None:
        """End an explicit step."""
        self.open = False
        self._ended_well[_OUTSIDE] = ended_well

    def note(self, done: torch.futures.Future[T]) -> T:
        """Return the value of a call's future; an error is one of this step."""
        with self.watching():
            return done.value()

    def unused_part(self, parameters: Sequence[torch.Tensor]) -> list[UnusedPart]:  # noqa: ARG002
        """Return nothing: every tensor that comes is used."""
        return []
