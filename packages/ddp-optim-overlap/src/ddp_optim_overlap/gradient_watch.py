"""Which parameters get gradients, and which gradients a step has used up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ddp_optim_overlap.errors import DoubleBackwardError
from ddp_optim_overlap.step_inputs import gradient_mark, gradient_marks

__all__ = ["GradientWatch"]


class GradientWatch:
    """Notice every gradient of some parameters, and refuse one that is added to what a step has used.

    No gradients are kept, so that setting them to ``None`` frees them: only where each one lies in memory,
    and its version, which every write in place raises.

    Attributes:
        new: Which parameters got a gradient since this was cleared, or had one at the beginning.
        step_stands: Whether the last pass has stepped and no gradient has come since.
        arrives: Called with a parameter that has got a gradient, before DDP reads it.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        parameters = list(parameters)
        self.new = {parameter for parameter in parameters if parameter.grad is not None}
        self.step_stands = False
        self.arrives: Callable[[torch.Tensor], None] | None = None
        self._used: dict[torch.Tensor, tuple[int, int]] = {}
        self._adds_to_used: set[torch.Tensor] = set()
        self._hooks: dict[torch.Tensor, list[Any]] = {}
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take notice of the gradients of these parameters."""
        for parameter in parameters:
            if parameter in self._hooks or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            trained = parameter.requires_grad
            parameter.requires_grad_()  # or torch takes no hook; it keeps those of frozen ones
            before = _hook(GradientWatch._gradient_comes, weakref.ref(self), weakref.ref(parameter))
            after = _hook(GradientWatch._got_gradient, weakref.ref(self), weakref.ref(parameter))
            self._hooks[parameter] = [
                parameter.register_hook(before),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
            ]
            parameter.requires_grad_(trained)

    def __del__(self) -> None:
        self.stop()

    def watches(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these parameters, all of them, are watched."""
        return all(parameter in self._hooks for parameter in parameters)

    def stop(self) -> None:
        """Take notice of no gradients any more."""
        while self._hooks:
            for hook in self._hooks.popitem()[1]:
                hook.remove()

    def used(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[int, int]]:
        """Take the gradients of these, and no others, as used up; return the mark of each."""
        marks = gradient_marks(parameters)
        self._used = dict(marks)
        return marks

    def is_new(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has got a gradient, and it was not taken away since."""
        return parameter in self.new and parameter.grad is not None

    def averaged_anew(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these, which DDP is about to write, as not used."""
        for parameter in parameters:
            self._used.pop(parameter, None)

    def forget(self) -> None:
        """Take none as used up."""
        self._used.clear()

    def _gradient_comes(self, parameter: torch.Tensor) -> None:
        """Look at ``parameter.grad`` before a gradient is added; ``torch.autograd.grad`` will add none."""
        if self._is_used_up(parameter):
            self._adds_to_used.add(parameter)
        else:
            self._adds_to_used.discard(parameter)

    def _got_gradient(self, parameter: torch.Tensor) -> None:
        if self.arrives is not None:
            self.arrives(parameter)
        if parameter in self._adds_to_used:
            raise DoubleBackwardError(
                "backward() adds to gradients that a step has already used: call zero_grad() after each "
                "step, and accumulate with no_sync() or pause()"
            )
        self.step_stands = False
        self._used.pop(parameter, None)
        self.new.add(parameter)

    def _is_used_up(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter.grad`` is what a step has used, changed or not, and not zeros."""
        gradient = parameter.grad
        if gradient is None or parameter not in self._used:
            return False
        if gradient.device.type != "cpu":  # reading it would block the host: a changed one passes for zeros
            return gradient_mark(gradient) == self._used[parameter]
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())  # ten times as fast as any()


def _hook(
    method: Callable[[GradientWatch, torch.Tensor], None],
    watch: weakref.ref[GradientWatch],
    parameter: weakref.ref[torch.Tensor],
) -> Callable[[torch.Tensor | None], None]:
    """Return a hook on a parameter that keeps neither alive."""

    def notice(gradient: torch.Tensor | None) -> None:
        alive, owner = watch(), parameter()
        if alive is not None and owner is not None and gradient is not None:
            method(alive, owner)

    return notice
