"""Detect inputs of a step that were changed after it had read them.

Versions of tensors count writes. But torch's operators on lists of tensors, as in ``clip_grad_norm_``,
``GradScaler.unscale_`` and ``zero_grad``, do not raise versions on an accelerator, nor do some on a CPU. So
the values of a sample are compared, too, on their device: reading its memory makes the host wait.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ddp_optim_overlap.optimizers.equality import same_value
from ddp_optim_overlap.optimizers.partial_steps import PARAMETER_NAMES, parameters_of
from ddp_optim_overlap.passes.bucket import fills_its_memory
from ddp_optim_overlap.passes.gradient_watch import GradientMark, gradient_marks, tensor_versions
from dist_utils.torch_compat import tensor_version

_SAMPLED = 2
"""How many parameters are sampled, or one more: what clips or unscales one gradient does so with all."""
_VALUES = 128
"""How many values of a parameter, and of its gradient, from its beginning."""


class _Sample(NamedTuple):
    """Values of tensors: in the host's memory as bytes, others put together by device and dtype."""

    on_host: bytes
    elsewhere: dict[tuple[torch.device, torch.dtype], torch.Tensor]


class StepInputs:
    """The inputs of a step, as it has left them.

    Cheap, and so not complete: writes through ``.data``, by collectives and by some operators on lists of
    tensors are only seen in the sample; writes into states are not seen.

    Args:
        optimizer: The optimizer that was stepped.
        marks: The marks of used gradients, those of other parameters among them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, marks: Mapping[int, GradientMark]) -> None:
        self._options, self._state = _options_of(optimizer), optimizer.state
        self._parameters = parameters_of(optimizer)
        self._marks = [marks.get(id(one)) for one in self._parameters]
        self._versions = tensor_versions(self._parameters)
        self._sample = self._values_now()

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
        if gradient_marks(parameters) != self._marks:
            return "gradients were changed (clipped, unscaled, set to None, ...)"
        return None

    def compare_sample(self) -> Comparison:
        """Start to compare the sample with what is there now."""
        return Comparison(self._sample, self._values_now())

    def _values_now(self) -> _Sample:
        """Return the sampled values, at this point of the device's stream.

        Costs one kernel for each dtype and accelerator, and three for each comparison. No tensor is kept.
        """
        on_host = []
        elsewhere: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in self._parameters[:: max(1, len(self._parameters) // _SAMPLED)]:
            for tensor in (parameter, parameter.grad):
                if tensor is None or not _is_dense(tensor):
                    continue
                count = min(tensor.numel(), _VALUES)
                if tensor.is_cpu and (address := tensor.data_ptr()):
                    on_host.append(ctypes.string_at(address, count * tensor.element_size()))
                else:
                    first = tensor.detach().as_strided((count,), (1,))
                    elsewhere.setdefault((tensor.device, tensor.dtype), []).append(first)
        together = {kind: torch.cat(values) for kind, values in elsewhere.items()}
        return _Sample(b"".join(on_host), together)


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


class Comparison:
    """An answer that the devices may not have computed yet: whether bits differ.

    Args:
        before: What was sampled.
        now: What is there instead.

    Attributes:
        is_known: Whether the answer is there without a wait.
    """

    def __init__(self, before: _Sample, now: _Sample) -> None:
        sizes_before, sizes_now = (
            {kind: len(one) for kind, one in each.elsewhere.items()} for each in (before, now)
        )
        self._differs = before.on_host != now.on_host or sizes_before != sizes_now
        kinds = [] if self._differs else list(before.elsewhere)
        pairs = [(before.elsewhere[kind], now.elsewhere[kind]) for kind in kinds]
        differ = [one.view(torch.uint8).ne(other.view(torch.uint8)).any() for one, other in pairs]
        self._on_devices = [one.to("cpu", non_blocking=True) for one in differ]
        self._events = [_record_event(device) for device in {one.device for one in differ if not one.is_cpu}]
        self.is_known = not self._events

    def differs(self) -> bool:
        """Return the answer. Waits until the devices have computed the comparison."""
        for event in self._events:
            event.synchronize()
        return self._differs or any(map(bool, self._on_devices))


def _record_event(device: torch.device) -> Any:
    return torch.get_device_module(device).current_stream(device).record_event()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values are the first values in its memory."""
    if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:  # freed, by offloading
        return False
    return tensor.is_contiguous() or fills_its_memory(tensor)
