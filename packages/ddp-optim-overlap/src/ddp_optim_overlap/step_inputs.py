"""What a step has read that somebody has changed since."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.partial_steps import parameters_of
from dist_utils.torch_compat import tensor_version

__all__ = ["StepInputs", "gradient_mark", "gradient_marks"]


class StepInputs:
    """What a step has read of an optimizer and its parameters, and what it has left.

    Cheap, and so not complete: writes through ``.data`` into parameters are not seen, and such writes into
    gradients, and collectives, are seen in a sample of the gradients on CPUs.

    Args:
        optimizer: It has just been stepped.
        gradients: The marks of its parameters' gradients, and perhaps of others.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gradients: Mapping[torch.Tensor, tuple[int, int]]
    ) -> None:
        self._groups = [_options(group) for group in optimizer.param_groups]
        self._state = optimizer.state
        parameters = parameters_of(optimizer)
        self._versions = [tensor_version(parameter) for parameter in parameters]
        self._gradients = {
            parameter: gradients[parameter] for parameter in parameters if parameter in gradients
        }
        self._sample = _sample(parameters)

    def changed(self, optimizer: torch.optim.Optimizer, contents: GradientContents | None) -> str | None:
        """Name what somebody has changed since.

        Args:
            optimizer: The same.
            contents: Of the gradients: one that was written, and has the same bits, is not changed.
                ``None`` if any write is a change, as it was meant for what the step has written over.
        """
        if optimizer.state is not self._state:
            return "the optimizer's state was loaded"
        if len(optimizer.param_groups) != len(self._groups):
            return "parameter groups were added or taken away"
        for number, (before, group) in enumerate(zip(self._groups, optimizer.param_groups, strict=True)):
            now = _options(group)
            for name, value in before.items():
                other = now.get(name)
                if value is not other and not equal(value, other):
                    return f"{name} of parameter group {number} was changed"
        parameters = parameters_of(optimizer)
        if [tensor_version(parameter) for parameter in parameters] != self._versions:
            return "parameters were changed"
        marks = gradient_marks(parameters)
        written = [one for one in parameters if marks.get(one) != self._gradients.get(one)]
        if (written and (contents is None or not contents.are_unchanged(written))) or any(
            (gradient := parameter.grad) is not None and _first_bytes(gradient) != before
            for parameter, before in self._sample
        ):
            return "gradients were changed (clipped, unscaled, set to None, ...)"
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


def gradient_mark(gradient: torch.Tensor) -> tuple[int, int]:
    """Return what every write in place and every other gradient changes."""
    return tensor_version(gradient), 0 if gradient.is_sparse else gradient.data_ptr()


def gradient_marks(parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[int, int]]:
    """Return the marks of the gradients that there are."""
    return {
        parameter: gradient_mark(gradient)
        for parameter in parameters
        if (gradient := parameter.grad) is not None
    }
