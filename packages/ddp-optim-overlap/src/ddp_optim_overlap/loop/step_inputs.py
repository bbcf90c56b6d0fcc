"""Detect inputs of a step that were changed after it had read them.

Versions of tensors count writes. But torch's operators on lists of tensors, as in ``clip_grad_norm_``,
``GradScaler.unscale_`` and ``zero_grad``, do not raise versions on an accelerator. Reading its memory makes
the host wait, so a sample is compared on the device, and the answer is read when it has been computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ddp_optim_overlap.loop.gradient_watch import gradient_marks, tensor_versions
from ddp_optim_overlap.optimizers.partial_steps import parameters_of
from dist_utils.torch_compat import tensor_version

__all__ = ["Comparison", "DeviceSample", "Options", "StepInputs", "options_of"]

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

    def changed(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Name what was changed since, even if the new bits are the old ones; ``None`` if nothing was.

        Args:
            optimizer: The same optimizer.
        """
        if optimizer.state is not self._state:
            return "the optimizer's state was loaded"
        if len(optimizer.param_groups) != len(self._groups):
            return "parameter groups were added or taken away"
        for number, (before, now) in enumerate(zip(self._groups, options_of(optimizer), strict=True)):
            for name, value in before.items():
                other = now.get(name)
                if value is not other and not _equal(value, other):
                    return f"{name} of parameter group {number} was changed"
        parameters = parameters_of(optimizer)
        if tensor_versions(parameters) != self._versions:
            return "parameters were changed"
        sampled = [(before, _contents(parameter, optimizer)) for parameter, before in self._sample]
        for place, what in enumerate(("parameters were", "the optimizer's state was")):
            if any(before[place] != now[place] for before, now in sampled):
                return f"{what} changed"
        if gradient_marks(parameters) != self.marks or any(before[2] != now[2] for before, now in sampled):
            return "gradients were changed (clipped, unscaled, set to None, ...)"
        return None


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; arrays, whose ``==`` has no single answer, are not."""
    try:
        return bool(one == other) or (one != one and other != other)  # noqa: PLR0124 - NaN
    except (RuntimeError, TypeError, ValueError):
        return False


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


_READ_AT_ONCE = ("cpu", "meta")
"""Devices whose tensors need no sample."""
_VALUES = 128
"""The number of values sampled per tensor, from its beginning."""


class DeviceSample:
    """The first values of some tensors, at this point of the device's stream.

    Args:
        tensors: The tensors. Those on CPUs, and those that are not dense, are left out.

    Attributes:
        empty: Whether none are left.

    Cost:
        One kernel for each dtype and device, and three for each comparison. No tensor is kept.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        self._values = _first_values_of(tensors)
        self.empty = not self._values

    def compare(self, tensors: Iterable[torch.Tensor | None]) -> Comparison:
        """Start comparing the bits of these tensors, or of their replacements, with the sample."""
        now = _first_values_of(tensors)
        if {kind: len(values) for kind, values in now.items()} != {
            kind: len(values) for kind, values in self._values.items()
        }:
            return Comparison([], changed=True)
        return Comparison(
            [
                before.view(torch.uint8).ne(now[kind].view(torch.uint8)).any()
                for kind, before in self._values.items()
            ]
        )


class Comparison:
    """An answer that the devices may not have computed yet.

    Args:
        answers: Tensors of one value each, on accelerators; the answer is yes if any is true.
        changed: If true, the answer is yes in any case.
    """

    def __init__(self, answers: Sequence[torch.Tensor], *, changed: bool = False) -> None:
        self._changed = changed
        self._answers = [answer.to("cpu", non_blocking=True) for answer in answers]
        self._events = [_record_event(device) for device in {answer.device for answer in answers}]

    def found(self) -> bool:
        """Return the answer. Waits until the devices have computed the comparison."""
        for event in self._events:
            event.synchronize()
        return self._changed or any(map(bool, self._answers))


def _first_values_of(
    tensors: Iterable[torch.Tensor | None],
) -> dict[tuple[torch.device, torch.dtype], torch.Tensor]:
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type not in _READ_AT_ONCE and _is_dense(tensor):
            by_kind.setdefault((tensor.device, tensor.dtype), []).append(_first_values(tensor))
    return {kind: torch.cat(views) for kind, views in by_kind.items()}


def _record_event(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device).record_event()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are the first values in its memory, unmodified."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.untyped_storage().nbytes() == 0:  # freed meanwhile, for example by offloading
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _first_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((min(tensor.numel(), _VALUES),), (1,))
