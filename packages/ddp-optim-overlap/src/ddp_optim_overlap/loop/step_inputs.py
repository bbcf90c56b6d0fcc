"""Detect inputs of a step that were changed after it had read them.

Versions of tensors count writes. But torch's operators on lists of tensors, as in ``clip_grad_norm_``,
``GradScaler.unscale_`` and ``zero_grad``, do not raise versions on an accelerator. Reading its memory makes
the host wait, so a sample is compared on the device, and the answer is read when it has been computed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ddp_optim_overlap.optimizers.equality import same_value
from ddp_optim_overlap.optimizers.partial_steps import PARAMETER_NAMES, parameters_of
from ddp_optim_overlap.passes.gradient_watch import GradientMark, gradient_marks, tensor_versions
from dist_utils.torch_compat import tensor_version

_DeviceValues = dict[tuple[torch.device, torch.dtype], torch.Tensor]
"""Values of tensors on accelerators, put together by device and dtype."""


class StepInputs:
    """The inputs of a step, and what the step has left.

    Cheap, and so not complete: writes through ``.data``, by collectives and, on accelerators, by operators
    on lists of tensors are only seen in a sample of parameters and gradients; writes into states only in a
    sample of states.

    Args:
        optimizer: The optimizer that is about to be stepped.

    Attributes:
        parameters: The parameters of all its groups, in order, once it is stepped.
        marks: The marks of their gradients.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._options, self._state = _options_of(optimizer), optimizer.state
        self.parameters: list[torch.Tensor] = []
        self.marks: list[GradientMark] = []
        self._versions: list[int] = []
        self._sample: list[tuple[torch.Tensor, tuple[bytes, list[Any], bytes]]] = []
        self._on_device: _DeviceValues = {}

    def record(self, optimizer: torch.optim.Optimizer, options_set: dict[int, dict[str, Any]]) -> None:
        """Record what the step has left.

        Args:
            optimizer: The same optimizer.
            options_set: The options that the step itself has set, by group.
        """
        for number, values in options_set.items():
            self._options[number].update({name: _copy_of(value) for name, value in values.items()})
        self.parameters = parameters = parameters_of(optimizer)
        self._versions = tensor_versions(parameters)
        self.marks = gradient_marks(parameters)
        every = max(1, len(parameters) // _SAMPLED)
        self._sample = [(one, _contents(one, optimizer)) for one in parameters[::every]]
        self._on_device = self._device_values()

    def compare_on_device(self) -> Comparison | None:
        """Start comparing what lies on accelerators, whose memory :meth:`find_change` does not read."""
        return Comparison(self._on_device, self._device_values()) if self._on_device else None

    def find_change(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Name what was changed since, even if the new bits are the old ones; ``None`` if nothing was.

        Args:
            optimizer: The same optimizer.
        """
        options = _options_of(optimizer)
        if optimizer.state is not self._state:
            return "the optimizer's state was loaded"
        if len(options) != len(self._options):
            return "parameter groups were added or taken away"
        for number, (before, now) in enumerate(zip(self._options, options, strict=True)):
            for name, value in before.items():
                if not same_value(value, now.get(name)):
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

    def _device_values(self) -> _DeviceValues:
        """Return the first values of sampled tensors, at this point of the device's stream.

        Costs one kernel for each dtype and device, and three for each comparison. No tensor is kept.
        """
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter, _ in self._sample:
            for tensor in (parameter, parameter.grad):
                if tensor is not None and not tensor.is_cpu and _is_dense(tensor):
                    first = tensor.detach().as_strided((min(tensor.numel(), _VALUES),), (1,))
                    by_kind.setdefault((tensor.device, tensor.dtype), []).append(first)
        return {kind: torch.cat(values) for kind, values in by_kind.items()}


def _options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of all groups for a later comparison; of the parameters, only their number."""
    return [
        {name: len(value) if name in _LISTS else _copy_of(value) for name, value in group.items()}
        for group in optimizer.param_groups
    ]


_LISTS = ("params", PARAMETER_NAMES)


def _copy_of(value: Any) -> Any:
    """Return a copy of an option that shows changes in place; of a tensor, its identity and version."""
    if isinstance(value, torch.Tensor):
        return id(value), tensor_version(value)
    if isinstance(value, Mapping):
        return {key: _copy_of(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copy_of(one) for one in value]
    return value


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


_VALUES = 128
"""The number of values sampled per tensor, from its beginning."""


class Comparison:
    """An answer that the devices may not have computed yet: whether bits differ.

    Args:
        before: What was sampled.
        now: What is there instead.
    """

    def __init__(self, before: _DeviceValues, now: _DeviceValues) -> None:
        sizes_before, sizes_now = ({kind: len(one) for kind, one in each.items()} for each in (before, now))
        self._other_tensors = sizes_before != sizes_now
        differ: Sequence[torch.Tensor] = ()
        if not self._other_tensors:
            pairs = [(one.view(torch.uint8), now[kind].view(torch.uint8)) for kind, one in before.items()]
            differ = [one.ne(other).any() for one, other in pairs]
        self._differ = [one.to("cpu", non_blocking=True) for one in differ]
        self._events = [_record_event(device) for device in {one.device for one in differ}]

    def differs(self) -> bool:
        """Return the answer. Waits until the devices have computed the comparison."""
        for event in self._events:
            event.synchronize()
        return self._other_tensors or any(map(bool, self._differ))


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
