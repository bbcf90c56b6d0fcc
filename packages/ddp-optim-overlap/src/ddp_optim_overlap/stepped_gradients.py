"""Which gradients a step has used up, and what it has read that somebody has changed since."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ddp_optim_overlap.partial_steps import parameters_of
from dist_utils.torch_compat import tensor_version

__all__ = ["StepInputs", "SteppedGradients"]


class SteppedGradients:
    """Remember gradients as they were when the backward pass that stepped with them had ended.

    No copies and no references are kept, so that setting them to ``None`` frees them: only where each one
    lies in memory, and its version, which every write in place raises.
    """

    def __init__(self) -> None:
        self._seen: dict[torch.Tensor, tuple[int, int]] = {}

    def remember(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these, and no others, as used up."""
        self._seen = {
            parameter: _mark(gradient) for parameter in parameters if (gradient := parameter.grad) is not None
        }

    def forget(self) -> None:
        """Take none as used up."""
        self._seen.clear()

    def is_used_up(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter.grad`` is what a step has used, changed or not, and not zeros."""
        gradient = parameter.grad
        if gradient is None or parameter not in self._seen:
            return False
        if gradient.device.type != "cpu":  # reading it would block the host: a changed one passes for zeros
            return _mark(gradient) == self._seen[parameter]
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())  # ten times as fast as any()

    def got_new(self, parameter: torch.Tensor) -> None:
        """Take what this has now as not used."""
        self._seen.pop(parameter, None)

    def changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Tell whether somebody has written into one of these since, other than by taking it away."""
        return any(
            (gradient := parameter.grad) is not None and _mark(gradient) != seen
            for parameter in parameters
            if (seen := self._seen.get(parameter)) is not None
        )


class StepInputs:
    """What a step has read of an optimizer and its parameters, and what it has left.

    Cheap, and so not complete: writes through ``.data`` into parameters are not seen, and such writes into
    gradients, and collectives, are seen in a sample of the gradients on CPUs.

    Args:
        optimizer: It has just been stepped.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [_options(group) for group in optimizer.param_groups]
        self._state = optimizer.state
        parameters = parameters_of(optimizer)
        self._versions = [tensor_version(parameter) for parameter in parameters]
        self._sample = _sample(parameters)

    def changed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Name what somebody has changed since."""
        if optimizer.state is not self._state:
            return "the optimizer's state was loaded"
        if len(optimizer.param_groups) != len(self._groups):
            return "parameter groups were added or taken away"
        for number, (before, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=True)):
            now = _options(group)
            for name, value in before.items():
                if now.get(name) != value:
                    return f"{name} of parameter group {number} was changed"
        if [tensor_version(parameter) for parameter in parameters_of(optimizer)] != self._versions:
            return "parameters were changed"
        if any(
            (gradient := parameter.grad) is not None and _first_bytes(gradient) != before
            for parameter, before in self._sample
        ):
            return "gradients were changed (clipped, unscaled, ...)"
        return None


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """Return what ``==`` may compare: of a tensor, such as a learning rate, which and its version."""
    return {
        name: len(value)
        if name == "params"
        else (id(value), tensor_version(value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in group.items()
    }


_SAMPLED_GRADIENTS = 8
_SAMPLED_BYTES = 1024


def _sample(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, bytes]]:
    """Return the beginning of some gradients."""
    every = max(1, len(parameters) // _SAMPLED_GRADIENTS)
    return [
        (parameter, _first_bytes(gradient))
        for parameter in parameters[::every]
        if (gradient := parameter.grad) is not None
    ]


def _first_bytes(gradient: torch.Tensor) -> bytes:
    """Return bits, not numbers, as NaN differs from itself; nothing of what is not a plain piece of memory.

    Torch's operators take ten times as long, and this is done while nothing hides it.
    """
    if gradient.device.type != "cpu" or gradient.is_sparse or not gradient.is_contiguous():
        return b""
    return ctypes.string_at(gradient.data_ptr(), min(_SAMPLED_BYTES, gradient.nbytes))


def _mark(gradient: torch.Tensor) -> tuple[int, int]:
    return tensor_version(gradient), 0 if gradient.is_sparse else gradient.data_ptr()
