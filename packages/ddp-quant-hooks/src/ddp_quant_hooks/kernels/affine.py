"""PyTorch's 8-bit numbers: an affine map of each channel's range, which includes zero, to 0..255.

``q = round(x / scale) + zero_point`` with ``scale = (highest - lowest) / 255``, separately on every rank. A
message is ``[q of all channels][scale of each][zero point of each]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from ddp_quant_hooks.kernels.layout import ALIGNMENT, is_integer

_VALUES_AT_ONCE = 1 << 17
"""The most values that are processed at once, so that temporaries stay small."""


@dataclass(frozen=True)
class AffineLayout:
    """The layout of a message.

    Args:
        values: Number of values.
        channel: Values per channel; the last may be shorter.
        dtype: The dtype of the parameters and of the computation: fp32, or fp64 for fp64 values.

    Raises:
        TypeError: A number is not an int.
        ValueError: ``values`` is negative, ``channel`` less than 1, or there is no such ``dtype``.
    """

    values: int
    channel: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name, number, least in (("values", self.values, 0), ("channel", self.channel, 1)):
            if not is_integer(number):
                raise TypeError(f"{name} must be an int, got {number!r}")
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")

    @property
    def channels(self) -> int:
        """The number of channels."""
        return -(-self.values // self.channel)

    @property
    def _payload_bytes(self) -> int:
        return -(-self.values // ALIGNMENT) * ALIGNMENT

    @property
    def message_bytes(self) -> int:
        """The length of a message."""
        length = self._payload_bytes + 2 * self.channels * self.dtype.itemsize
        return -(-length // ALIGNMENT) * ALIGNMENT  # so that the next message is aligned too

    def payload(self, message: torch.Tensor) -> torch.Tensor:
        """Return the quantized values, uint8."""
        return message[: self.values]

    def parameters(self, message: torch.Tensor) -> torch.Tensor:
        """Return scales and zero points, of shape (2, channels)."""
        length = 2 * self.channels * self.dtype.itemsize
        return message[self._payload_bytes : self._payload_bytes + length].view(self.dtype).view(2, -1)

    def pieces(self) -> list[tuple[slice, slice]]:
        """Cut the values into pieces that are processed at once: whole channels, or part of one.

        Returns slices of the values, and of the channels that they are in.
        """
        step = max(_VALUES_AT_ONCE // self.channel, 1) * self.channel
        found = []
        for first in range(0, self.values, step):
            last = min(first + step, self.values)
            channels = slice(first // self.channel, -(-last // self.channel))
            found += [
                (slice(start, min(start + _VALUES_AT_ONCE, last)), channels)
                for start in range(first, last, _VALUES_AT_ONCE)
            ]
        return found

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return a piece's channels as rows; zeros pad the last row, and change no range."""
        width = min(self.channel, values.numel())
        return pad(values, (0, -values.numel() % width)).view(-1, width)


@torch.no_grad()
def affine_encode(values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
    """Write the message of flat ``values``."""
    payload, parameters = layout.payload(message), layout.parameters(message)
    scale, zero_point = _parameters(*_ranges(values, layout))
    parameters[0], parameters[1] = scale, zero_point
    for span, channels in layout.pieces():
        rows = layout.rows(values[span].to(layout.dtype))
        numbers = rows.div_(scale[channels, None]).round_().add_(zero_point[channels, None])
        part = payload[span]
        part.copy_(numbers.nan_to_num_(0.0).clamp_(0, 255).flatten()[: part.numel()])


@torch.no_grad()
def affine_decode(messages: Sequence[torch.Tensor], layout: AffineLayout, values: torch.Tensor) -> None:
    """Write the mean of the messages' values to flat ``values``. A channel that is not finite is NaN."""
    parameters = torch.stack([layout.parameters(message) for message in messages]).unsqueeze(3)
    # A sum of finite values must not overflow.
    one = parameters.new_ones(())  # two Python numbers would give the default dtype
    shrink = torch.where(parameters[:, 0].amax(0) >= 2.0**90, 2.0**-20, one)
    ranks = torch.full_like(shrink, len(messages))
    limits = torch.finfo(values.dtype)
    for span, channels in layout.pieces():
        total = torch.zeros((), dtype=layout.dtype, device=values.device)
        for message, (scale, zero_point) in zip(messages, parameters, strict=True):
            numbers = layout.rows(layout.payload(message)[span]).to(layout.dtype)
            total = total + (scale[channels] * shrink[channels]) * (numbers - zero_point[channels])
        mean = (total / ranks[channels]) * (1.0 / shrink[channels])
        part = values[span]
        part.copy_(mean.clamp_(limits.min, limits.max).flatten()[: part.numel()])


def _ranges(values: torch.Tensor, layout: AffineLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the lowest and the highest value of each channel, with zero between them; NaN if one is."""
    lowest = torch.zeros(layout.channels, dtype=layout.dtype, device=values.device)
    highest = torch.zeros_like(lowest)
    for span, channels in layout.pieces():
        low, high = torch.aminmax(layout.rows(values[span]), dim=1)
        lowest[channels] = torch.minimum(lowest[channels], low.to(layout.dtype))
        highest[channels] = torch.maximum(highest[channels], high.to(layout.dtype))
    return lowest, highest


def _parameters(lowest: torch.Tensor, highest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of each channel."""
    levels = torch.full_like(lowest, 255.0)
    width = highest - lowest
    # The difference of finite numbers can overflow.
    scale = torch.where(width.isinf(), highest / levels - lowest / levels, width / levels)
    # Rounding may make a subnormal quotient much too small, but the range must fit.
    too_small = (scale * levels < width) & (scale < torch.finfo(lowest.dtype).smallest_normal)
    scale = torch.where(too_small, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(width == 0, 1.0, scale)
    zero_point = (-(lowest / scale).round()).clamp(0, 255) + 0.0  # never -0.0
    # An infinity or a NaN makes the whole channel NaN, on every rank.
    finite = scale.isfinite()
    return torch.where(finite, scale, torch.nan), torch.where(finite, zero_point, 0.0)
