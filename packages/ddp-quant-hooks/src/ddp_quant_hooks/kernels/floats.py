"""Values as 16-bit floats, relative to nothing: cast, and averaged in fp32, by torch operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ddp_quant_hooks.kernels.call import KernelCall


@torch.no_grad()
def run(call: KernelCall) -> None:
    """Do a call; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`.

    A value is rounded once, to the nearest, and a finite one stays finite. A mean is the sum of all messages'
    values in fp32, in their order, divided by their number. NaN and infinities stay.

    Raises:
        ValueError: Other messages are relative to their blocks; or there are residuals.
    """
    dtype = call.layout.dtype
    if dtype is None or call.new_layout.dtype is None:
        raise ValueError(f"{call.layout.format} cannot become {call.new_layout.format}")
    if call.residual is not None or call.new_residual is not None:
        raise ValueError(f"{call.layout.format} has no residuals")
    lengths = list(call.lengths)
    parts = [None] * len(lengths) if call.values is None else call.values.split_with_sizes(lengths)
    for index, (length, part) in enumerate(zip(lengths, parts, strict=True)):
        if call.incoming:
            values = _mean([values_of(message, dtype, length) for message in call.incoming[index]])
        else:
            assert part is not None, "values are encoded where nothing is incoming"
            values = part
        if call.outgoing:
            _round(values, values_of(call.outgoing[index], call.new_layout.dtype, length))
        elif part is not None:
            part.copy_(values)


def values_of(message: torch.Tensor, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return the values in a message."""
    return message[: length * dtype.itemsize].view(dtype)


def _mean(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean of several messages' values, in fp32."""
    first, *others = messages
    if not others:
        return first
    # Made smaller first, as a sum of finite values may not be finite; by a power of two, which rounds nothing
    # but subnormal numbers.
    scale = 2.0 ** -math.ceil(math.log2(len(messages)))
    mean = first.float().mul_(scale)
    for other in others:
        mean.add_(other, alpha=scale)
    if (rest := len(messages) * scale) != 1:
        mean.div_(torch.full((), rest, device=mean.device))  # by a number, torch may multiply instead
    return mean


def _round(values: torch.Tensor, rounded: torch.Tensor) -> None:
    """Write values in another dtype. The largest of fp32 would become infinities there."""
    rounded.copy_(values)
    if values.dtype == rounded.dtype or not values.numel():
        return
    if values.device.type == "cpu" and torch.stack(torch.aminmax(rounded)).isfinite().all():
        return  # as nearly always; accelerators are not waited for
    largest = torch.finfo(rounded.dtype).max
    rounded.copy_(torch.where(values.isfinite(), values.clamp(-largest, largest), values))
