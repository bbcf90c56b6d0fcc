"""One step of plain tensors: which calls belong to it, and whether it counts."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

import torch

from ddp_quant_hooks.passes import BackwardPass, UnusedPart
from dist_utils import torch_compat

__all__ = ["TensorStep"]

_OUTSIDE = -1


class TensorStep(BackwardPass):
    """A step whose tensors are identified by keys.

    Args:
        explicit: Whether it lasts until it is closed; it has failed if it never is. Otherwise it is one call,
            or all calls inside one ``backward()``.

    Attributes:
        open: Whether it is explicit, and not closed.
    """

    def __init__(self, *, explicit: bool = False) -> None:
        super().__init__()
        self.open = explicit
        self._keys: set[str] = set()
        self._root: weakref.ref[torch.Tensor] | None = None  # of the outermost pass
        if explicit:
            self._ended_well[_OUTSIDE] = False

    def takes(self, task: int) -> bool:
        """Return whether a call that is made now, inside autograd's ``task``, belongs to it."""
        if self.open or task == _OUTSIDE or self.outside_of_backward:
            return self.open
        if task in self._ended_well or task < max(self._ended_well):
            return True  # this very task, or one around the tasks seen before
        if self.complete or not torch_compat.inside_nested_backward():
            return False
        return _outermost_root() is (None if self._root is None else self._root())

    def add_call(self, task: int) -> None:
        """Note a call inside autograd's ``task``."""
        if self.open or task in self._ended_well:
            return
        self.add_task(task)
        root = _outermost_root()
        self._root = None if root is None else weakref.ref(root)

    def use(self, keys: Sequence[str]) -> None:
        """Note that a call has these keys.

        Raises:
            ValueError: Another call of this step has one of them.
        """
        for key in keys:
            if key in self._keys:
                raise ValueError(f"the key {key!r} was used in this step: what it lost would be added twice")
        self._keys.update(keys)

    def add_tensors(self) -> int:
        """Note that tensors are averaged together, and return their number in the step."""
        self._last_index += 1
        self._buckets += 1
        return self._last_index

    def close(self, *, ended_well: bool) -> None:
        """End an explicit step."""
        self.open = False
        self._ended_well[_OUTSIDE] = ended_well

    def unused_part(self, parameters: Sequence[torch.Tensor]) -> list[UnusedPart]:  # noqa: ARG002
        """Return nothing: every tensor of a call is used."""
        return []


def _outermost_root() -> torch.Tensor | None:
    """Return a root tensor of the outermost backward pass around this call.

    ``None`` where the stack does not show it: outside of any pass, and on the engine's threads for
    accelerators. Costs a walk up the stack. torch has no name for it up to 2.15.
    """
    engine = torch_compat.private("torch.autograd.graph", "_engine_run_backward", "steps of nested passes")
    outermost, frame = None, sys._getframe().f_back  # noqa: SLF001
    while frame is not None:
        if frame.f_code is engine.__code__:
            outermost = frame
        elif frame.f_code is torch.autograd.function.BackwardCFunction.apply.__code__:
            outermost = None  # a node of a pass further out
        frame = frame.f_back
    roots = () if outermost is None else outermost.f_locals["t_outputs"]
    return next((root for root in roots if isinstance(root, torch.Tensor)), None)
