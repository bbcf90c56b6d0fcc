"""Checks of every partial step for problems that the trial before training cannot show."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ddp_optim_overlap.communication import CollectiveWatch
from ddp_optim_overlap.contents import changes, content_of, contents_of
from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.partial_steps import is_torchs_own, parameters_of

__all__ = ["PartChecks", "refuse_kept_gradients"]


class PartChecks:
    """Raises if a step of some parameters does what only a step of all of them may do.

    Args:
        optimizer: The optimizer whose parts are stepped. It must have passed its trial.
        written: What its steps may change in place, parameter by parameter, as found by its trial. ``None``:
            the optimizer itself steps, not a stand-in whose changes are lost.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, written: Collection[tuple[str, Any]] | None = None
    ) -> None:
        self.written = written
        self._name = type(optimizer).__name__
        self._watch = None if is_torchs_own(optimizer) else CollectiveWatch(optimizer)

    def around(self, part: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """Return a context for the step of ``part``.

        Raises:
            UnsupportedOptimizerError: On leaving: the step has changed options or attributes, which are lost
                with the part, or it has kept a gradient, whose memory the next backward pass writes. Inside:
                before a collective runs.
        """
        return contextlib.nullcontext() if self._watch is None else self._checked(part, self._watch)

    @contextlib.contextmanager
    def _checked(self, part: torch.optim.Optimizer, watch: CollectiveWatch) -> Iterator[None]:
        parameters = parameters_of(part)
        gradients = [one.grad for one in parameters if one.grad is not None]
        before = contents_of(part, [])
        with watch.around(parameters[0]):
            yield
        tensors: list[torch.Tensor] = []
        changed = changes(before, contents_of(part, tensors))
        if self.written is not None:
            self._refuse_changes(self.written, changed)
        for parameter in parameters:
            content_of(part.state.get(parameter), tensors)
            content_of(vars(parameter), tensors)
        refuse_kept_gradients(self._name, tensors, gradients)

    def _refuse_changes(
        self, written: Collection[tuple[str, Any]], changed: Mapping[tuple[str, Any], bool]
    ) -> None:
        for (kind, name), replaced in changed.items():
            # The optimizer keeps state without a parameter even if replaced; the rest is lost with the part.
            if (replaced and kind != "state") or (kind, name) not in written:
                raise UnsupportedOptimizerError(
                    f"the step of {self._name} has changed its {kind} {name!r}, which would be lost, or "
                    "happen once for every bucket. Use OverlapMode.AFTER_REDUCE, which steps all at once"
                )


def refuse_kept_gradients(
    optimizer: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Raise if a tensor shares memory with gradients.

    Raises:
        UnsupportedOptimizerError: One does.
    """
    of_gradients = {_memory(gradient) for gradient in gradients} - {0}
    for tensor in tensors:
        if _memory(tensor) in of_gradients:
            raise UnsupportedOptimizerError(
                f"the step of {optimizer} keeps a gradient itself, and not a copy of it: the next backward "
                "pass writes there. Use OverlapMode.AFTER_REDUCE"
            )


def _memory(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0
