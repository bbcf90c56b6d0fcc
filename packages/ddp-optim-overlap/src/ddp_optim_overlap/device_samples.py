"""Whether somebody has written tensors on an accelerator, where versions do not tell.

Torch's operators on lists of tensors, as in ``clip_grad_norm_``, ``GradScaler.unscale_`` and ``zero_grad``,
raise no versions there. Reading memory makes the host wait: it is compared on the device, and the answer is
read when the device has come to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__ = ["Comparison", "DeviceSample"]

_VALUES = 128
"""Of each tensor: its first."""


class DeviceSample:
    """The first values of some tensors, as they are when the device comes to this place of its stream.

    Args:
        tensors: Those on CPUs, and those that are not dense, are left out.

    Attributes:
        empty: Whether that leaves none.

    Cost:
        One kernel for each dtype and device, and three for each comparison.
    """

    def __init__(self, tensors: Iterable[torch.Tensor | None]) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for tensor in tensors:
            if tensor is not None and tensor.device.type not in ("cpu", "meta") and _is_dense(tensor):
                by_kind.setdefault((tensor.device, tensor.dtype), []).append(_first_values(tensor))
        self._views = list(by_kind.values())
        self._before = [torch.cat(views) for views in self._views]
        self.empty = not self._views

    def compare(self) -> Comparison:
        """Begin to compare the bits of these tensors with what they were."""
        return Comparison(
            [
                before.view(torch.uint8).ne(torch.cat(views).view(torch.uint8)).any()
                for before, views in zip(self._before, self._views, strict=True)
            ]
        )


class Comparison:
    """An answer that devices have not come to yet.

    Args:
        answers: It is yes if one of these is; of one value each, on accelerators.
    """

    def __init__(self, answers: Sequence[torch.Tensor]) -> None:
        self._answers = [answer.to("cpu", non_blocking=True) for answer in answers]
        devices = {answer.device for answer in answers}
        self._events = [
            torch.get_device_module(device).current_stream(device).record_event() for device in devices
        ]

    def found(self) -> bool:
        """Return the answer. Waits for the devices, until they have come to where the comparison began."""
        for event in self._events:
            event.synchronize()
        return any(map(bool, self._answers))


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether the first values in memory are the tensor's, as they are."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return False
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )


def _first_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().as_strided((min(tensor.numel(), _VALUES),), (1,))
