"""PyTorch's 8-bit numbers: an affine map of each channel's range, which includes zero, to 0..255.

``q = round(x / scale) + zero_point`` with ``scale = (highest - lowest) / 255``, for every rank its own. A
message is ``[q of all channels][scale of each][zero point of each]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

__all__ = ["AffineLayout", "decode_mean", "encode"]

_ALIGNMENT = 16
_VALUES_AT_ONCE = 1 << 17
"""Values that are computed in one go, so that temporaries stay small."""


@dataclass(frozen=True)
class AffineLayout:
    """How a message lies.

    Args:
        values: How many there are.
        channel: Values per channel; the last may be shorter.
        dtype: Of the parameters, and of what is computed: fp32, or fp64 for fp64 values.
    """

    values: int
    channel: int
    dtype: torch.dtype

    @property
    def channels(self) -> int:
        """How many channels there are."""
        return -(-self.values // self.channel)

    @property
    def _payload_bytes(self) -> int:
        return -(-self.values // _ALIGNMENT) * _ALIGNMENT

    @property
    def message_bytes(self) -> int:
        """The length of a message."""
        return self._payload_bytes + 2 * self.channels * self.dtype.itemsize

    def payload(self, message: torch.Tensor) -> torch.Tensor:
        """Return the numbers, uint8."""
        return message[: self.values]

    def parameters(self, message: torch.Tensor) -> torch.Tensor:
        """Return scales and zero points, of shape (2, channels)."""
        return message[self._payload_bytes :].view(self.dtype).view(2, -1)

    def pieces(self) -> list[tuple[slice, slice]]:
        """Cut into whole channels that are computed in one go: slices of values and of channels."""
        step = max(1, _VALUES_AT_ONCE // self.channel)
        return [
            (
                slice(first * self.channel, min((first + step) * self.channel, self.values)),
                slice(first, first + step),
            )
            for first in range(0, self.channels, step)
        ]

    def rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return whole channels as rows; zeros fill the last, and change no range."""
        width = min(self.channel, self.values)
        return pad(values, (0, -values.numel() % width)).view(-1, width)


def encode(values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
    """Write the message of flat ``values``."""
    payload, parameters = layout.payload(message), layout.parameters(message)
    for span, channels in layout.pieces():
        rows = layout.rows(values[span].to(layout.dtype))
        scale, zero_point = _parameters(rows)
        numbers = ((rows / scale).round_() + zero_point).nan_to_num_(0.0).clamp_(0, 255)
        part = payload[span]
        part.copy_(numbers.flatten()[: part.numel()])
        parameters[0, channels], parameters[1, channels] = scale.squeeze(1), zero_point.squeeze(1)


def decode_mean(messages: list[torch.Tensor], layout: AffineLayout, values: torch.Tensor) -> None:
    """Write the mean of the messages' values to flat ``values``. A channel that is not finite is NaN."""
    parameters = torch.stack([layout.parameters(message) for message in messages]).unsqueeze(3)
    # A sum of finite values must not overflow.
    shrink = torch.where(parameters[:, 0].amax(0) >= 2.0**90, 2.0**-20, 1.0)
    ranks = torch.full_like(shrink, len(messages))
    limits = torch.finfo(layout.dtype)
    for span, channels in layout.pieces():
        total = torch.zeros((), dtype=layout.dtype, device=values.device)
        for message, (scale, zero_point) in zip(messages, parameters, strict=True):
            numbers = layout.rows(layout.payload(message)[span]).to(layout.dtype)
            total = total + (scale[channels] * shrink[channels]) * (numbers - zero_point[channels])
        mean = (total / ranks[channels]) * (1.0 / shrink[channels])
        part = values[span]
        part.copy_(mean.clamp_(limits.min, limits.max).flatten()[: part.numel()])


def _parameters(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and zero point of each row, as columns."""
    levels = torch.full((), 255.0, dtype=rows.dtype, device=rows.device)
    lowest = rows.amin(1, keepdim=True).clamp(max=0)
    highest = rows.amax(1, keepdim=True).clamp(min=0)
    width = highest - lowest
    # The difference of finite numbers can overflow.
    scale = torch.where(width.isinf(), highest / levels - lowest / levels, width / levels)
    # Among the smallest numbers a quotient may be rounded down by a lot: the range must fit.
    too_small = (scale * levels < width) & (scale < torch.finfo(rows.dtype).smallest_normal)
    scale = torch.where(too_small, torch.nextafter(scale, torch.full_like(scale, torch.inf)), scale)
    scale = torch.where(width == 0, 1.0, scale)
    zero_point = (-(lowest / scale).round()).clamp(0, 255)
    # An infinity or a NaN makes the whole channel NaN, on every rank.
    finite = scale.isfinite()
    return torch.where(finite, scale, torch.nan), torch.where(finite, zero_point, 0.0)
