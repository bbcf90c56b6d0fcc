"""Detect writes to tensors on an accelerator, where versions do not tell.

Torch's operators on lists of tensors, as in ``clip_grad_norm_``, ``GradScaler.unscale_`` and ``zero_grad``,
do not raise versions there. Reading the memory makes the host wait, so it is compared on the device, and the
answer is read later, when the device has computed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

__all__ = ["Comparison", "DeviceSample"]

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
