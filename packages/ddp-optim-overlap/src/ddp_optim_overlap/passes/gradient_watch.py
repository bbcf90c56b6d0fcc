"""Track which parameters get gradients, and which gradients a step has used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import Node

from ddp_optim_overlap.errors import DoubleBackwardError
from dist_utils.torch_compat import version_reader

GradientMark = tuple[int, int] | None
"""The version of a gradient and its address, 0 if it is sparse; ``None`` without a gradient."""


class GradientWatch:
    """Notices every gradient of some parameters, and refuses one that is added to a gradient already used.

    No gradients are kept, so that setting them to ``None`` frees them: only the address of each, and its
    version, which every write in place raises.

    A hook runs for every parameter in every pass, while nothing else runs: it only sets flags, unless a
    gradient is added to another one.

    Args:
        parameters: To watch.
        before: Called with every parameter that got a gradient, before DDP reads the gradient.

    Attributes:
        may_be_added_to: Whether used gradients may be added to, as nothing steps with them by itself.
        marks: Of used gradients, by the ``id`` of the parameter: the hash of a tensor is computed in Python.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], before: Callable[[torch.Tensor], None] | None = None
    ) -> None:
        self.may_be_added_to = False
        self._before = before
        self._positions: dict[torch.Tensor, int] = {}
        # Flags by position, which hooks set.
        self._came, self._came_since_step = bytearray(), bytearray()
        self.marks: dict[int, GradientMark] = {}
        self._zeroed: bool | None = None  # all used gradients on accelerators; None: not known
        # A parameter does not keep its node, and with the node the hook would be lost.
        self._hooks: list[tuple[Node, torch.utils.hooks.RemovableHandle]] = []
        for parameter in parameters:
            if parameter in self._positions or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            position = self._positions[parameter] = len(self._positions)
            self._came.append(parameter.grad is not None)
            self._came_since_step.append(True)
            trained = parameter.requires_grad
            parameter.requires_grad_()  # a frozen one has no node, but keeps its node when it has one
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            parameter.requires_grad_(trained)
            self._hooks.append((node, node.register_prehook(self._hook(parameter, position))))

    def __del__(self) -> None:
        """Take the hooks away, which the parameters would keep."""
        self.stop()

    def stop(self) -> None:
        """Stop watching."""
        while self._hooks:
            self._hooks.pop()[1].remove()
        self._positions, self._came, self._came_since_step = {}, bytearray(), bytearray()
        self.mark_as_used([])

    @property
    def none_since_step(self) -> bool:
        """Whether a pass has stepped, and no gradient has come since."""
        came = self._came_since_step
        return bool(came) and 1 not in came

    def some_used_are_left(self) -> bool:
        """Whether a gradient that the last step has used is still there, and no other one has come for it."""
        return any(
            not self._came_since_step[position] and self._is_used_up(parameter)
            for parameter, position in self._positions.items()
        )

    def mark_as_used(self, parameters: Sequence[torch.Tensor]) -> None:
        """Count the gradients of these parameters, and no others, as used by a step."""
        self.marks = dict(zip(map(id, parameters), gradient_marks(parameters), strict=True))
        self._zeroed = None
        self._came_since_step[:] = bytes(len(self._positions))

    def mark_as_new(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the gradients of these parameters, which DDP is about to write, as not used."""
        for parameter in parameters:
            if (position := self._positions.get(parameter)) is not None:
                self._came_since_step[position] = True

    def has_come(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter got a gradient since :meth:`forget_arrivals`, and still has it."""
        position = self._positions.get(parameter)
        return position is not None and bool(self._came[position]) and parameter.grad is not None

    def forget_arrivals(self) -> None:
        """Reset the flags of :meth:`has_come`: a pass has handed over all its gradients."""
        self._came[:] = bytes(len(self._came))

    def _hook(
        self, parameter: torch.Tensor, position: int
    ) -> Callable[[Sequence[torch.Tensor | None]], None]:
        """Return a hook that runs before a gradient is added to ``.grad``, and does not keep the watch alive.

        ``torch.autograd.grad`` adds nothing, and does not run it.
        """
        weak_self, before = weakref.ref(self), self._before
        came, came_since_step = self._came, self._came_since_step

        def arrive(gradients: Sequence[torch.Tensor | None]) -> None:
            if gradients[0] is None:
                return
            if not came_since_step[position] and parameter.grad is not None:
                watch = weak_self()
                if watch is not None and watch._refuses(parameter):  # noqa: SLF001
                    raise DoubleBackwardError(
                        "backward() adds to gradients that a step has already used: call zero_grad() of the "
                        "model after each step (an optimizer's does not reach parameters that have left it), "
                        "accumulate with forward pass and backward() inside no_sync(), and run a pass that "
                        "is to step nothing, as for the gradients of inputs, under handle.pause()"
                    )
            if before is not None:
                before(parameter)
            came[position] = came_since_step[position] = True

        return arrive

    def _refuses(self, parameter: torch.Tensor) -> bool:
        return not self.may_be_added_to and self._is_used_up(parameter)

    def _is_used_up(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter.grad`` was used by a step, was changed or not since, and is not zero."""
        gradient, mark = parameter.grad, self.marks.get(id(parameter))
        if gradient is None or mark is None:
            return False
        if gradient.device.type != "cpu":  # reading it makes the host wait, so a written one counts as zeros
            if gradient_marks([parameter]) != [mark]:
                return False
            # zero_grad() of an optimizer with foreach or fused raises no versions here.
            if self._zeroed is None:
                self._zeroed = self._are_zero()
            if self._zeroed:
                return False
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())  # ten times as fast as any()

    def _are_zero(self) -> bool:
        """Whether all used gradients on accelerators that look unwritten are zeros.

        The host waits once instead of once per parameter, in a loop that sets gradients to zero.
        """
        if is_capturing():
            return True  # nothing can be read, so they count as zeros
        unwritten = [
            gradient
            for parameter in self._positions
            if (gradient := parameter.grad) is not None
            and not (gradient.is_cpu or gradient.is_sparse)
            and gradient_marks([parameter]) == [self.marks.get(id(parameter))]
        ]
        norm = torch.nn.utils.get_total_norm(unwritten, norm_type=torch.inf)
        return bool(unwritten) and not norm


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured on the current stream: nothing can be waited for."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def tensor_versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written in place; ``tensor_version`` takes twice the time."""
    read = version_reader()
    return [read(tensor) for tensor in tensors]


def gradient_marks(parameters: Iterable[torch.Tensor]) -> list[GradientMark]:
    """Return, for each parameter, a mark that changes if its gradient is written in place or replaced."""
    read = version_reader()
    return [
        None
        if (gradient := parameter.grad) is None
        else (read(gradient), 0 if gradient.is_sparse else gradient.data_ptr())
        for parameter in parameters
    ]
