"""Detect inputs of a step that were changed after it had read them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch

from ddp_optim_overlap.device_samples import Comparison, DeviceSample
from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.partial_steps import parameters_of
from ddp_optim_overlap.tensor_versions import gradient_marks, tensor_versions
from dist_utils.torch_compat import tensor_version

__all__ = ["Options", "StepInputs", "options_of"]

Options = list[dict[str, Any]]
"""The options of every group that ``==`` can compare."""


class StepInputs:
    """The inputs of a step, and what the step has left.

    Cheap, and so not complete: writes through ``.data``, by collectives and, on accelerators, by operators
    on lists of tensors are only seen in a sample of parameters and gradients; writes into states only in a
    sample of states.

    Args:
        optimizer: The optimizer that has just been stepped.
        options: The options that the step has read.
        state: The state that the step has read.

    Attributes:
        parameters: The parameters of all its groups, in order.
        marks: The marks of their gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        options: Options,
        state: Mapping[torch.Tensor, Any],
    ) -> None:
        self._groups = options
        self._state = state
        self.parameters = parameters = parameters_of(optimizer)
        self._versions = tensor_versions(parameters)
        self.marks = gradient_marks(parameters)
        every = max(1, len(parameters) // _SAMPLED)
        self._sample = [(one, _contents(one, optimizer)) for one in parameters[::every]]
        self._on_device = DeviceSample(self._sampled())

    def compare_on_device(self) -> Comparison | None:
        """Start comparing what lies on accelerators, whose memory :meth:`changed` does not read."""
        return None if self._on_device.empty else self._on_device.compare(self._sampled())

    def _sampled(self) -> list[torch.Tensor | None]:
        return [tensor for parameter, _ in self._sample for tensor in (parameter, parameter.grad)]

    def changed(self, optimizer: torch.optim.Optimizer, contents: GradientContents | None) -> str | None:
        """Name what was changed since; ``None`` if nothing was.

        Args:
            optimizer: The same optimizer.
            contents: The contents of the gradients: a gradient that was written with the same bits does not
                count as changed. ``None`` if every write counts, because the step itself writes gradients.
        """
        if optimizer.state is not self._state:
            return "the optimizer's state was loaded"
        if len(optimizer.param_groups) != len(self._groups):
            return "parameter groups were added or taken away"
        for number, (before, now) in enumerate(zip(self._groups, options_of(optimizer), strict=True)):
            for name, value in before.items():
                other = now.get(name)
                if value is not other and not equal(value, other):
                    return f"{name} of parameter group {number} was changed"
        parameters = parameters_of(optimizer)
        if tensor_versions(parameters) != self._versions:
            return "parameters were changed"
        sampled = [(before, _contents(parameter, optimizer)) for parameter, before in self._sample]
        for place, what in enumerate(("parameters were", "the optimizer's state was")):
            if any(before[place] != now[place] for before, now in sampled):
                return f"{what} changed"
        marks = gradient_marks(parameters)
        written = [
            parameter
            for parameter, now, before in zip(parameters, marks, self.marks, strict=True)
            if now != before
        ]
        if (written and (contents is None or not contents.are_unchanged(written))) or any(
            before[2] != now[2] for before, now in sampled
        ):
            return "gradients were changed (clipped, unscaled, set to None, ...)"
        return None


def options_of(optimizer: torch.optim.Optimizer) -> Options:
    """Return an optimizer's options; for a tensor, such as a learning rate, its identity and version."""
    return [_options(group) for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: len(value)
        if name == "params"
        else (id(value), tensor_version(value))
        if isinstance(value, torch.Tensor)
        else value
        for name, value in group.items()
    }


_SAMPLED = 8
"""How many parameters are sampled."""
_SAMPLED_BYTES = 1024


def _contents(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> tuple[bytes, list[Any], bytes]:
    """Return the beginning of a parameter, what is in its state, and the beginning of its gradient."""
    state: Mapping[str, Any] = optimizer.state.get(parameter, {})
    values = [
        (id(value), tensor_version(value)) if isinstance(value, torch.Tensor) else id(value)
        for value in state.values()
    ]
    return _first_bytes(parameter), values, _first_bytes(parameter.grad)


def _first_bytes(tensor: torch.Tensor | None) -> bytes:
    """Return bits, not numbers, because NaN differs from itself; ``b""`` if the memory is not contiguous.

    Torch's operators take ten times as long, and nothing hides the time of this.
    """
    if tensor is None or not tensor.is_cpu or tensor.is_sparse or not tensor.is_contiguous():
        return b""
    if tensor.untyped_storage().nbytes() == 0:  # freed meanwhile, for example by offloading
        return b""
    return ctypes.string_at(tensor.data_ptr(), min(_SAMPLED_BYTES, tensor.nbytes))
