"""The message format: blocks of numbers with few bits, and one scale per block, in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

__all__ = ["SCALE_BYTES", "WIRE_VERSION", "Format", "Layout", "can_rotate", "is_integer"]

WIRE_VERSION = 2
"""Version of the message format and of how values are chunked and sharded, equal on all ranks."""

Format: TypeAlias = Literal["int8", "int4", "bf16", "fp16"]
"""What a value becomes, relative to the largest magnitude of its block: an integer from -127 to 127 or
from -7 to 7, or a 16-bit float from -1 to 1."""

_BITS = {"int8": 8, "int4": 4, "bf16": 16, "fp16": 16}
SCALE_BYTES = 4
_SMALLEST_BLOCK, _LARGEST_BLOCK = 32, 4096


def is_integer(number: object) -> bool:
    """Return whether ``number`` is an int, or a symbolic one of ``torch.compile``. ``True`` is not one."""
    return isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)


def can_rotate(format: str, block_size: int) -> bool:  # noqa: A002 - the layout's name for it
    """Return whether blocks of this format and size can be rotated."""
    return format in {"int8", "int4"} and block_size > 0 and block_size & (block_size - 1) == 0


@dataclass(frozen=True)
class Layout:
    """The layout of a message: ``[payload][one fp32 scale per block]``, without a header.

    Args:
        format: The format of the payload's numbers.
        block_size: Values per block: a multiple of 32 up to 4096. The last block is filled with zeros.
        rotate: Whether blocks with a few large values are rotated first (:mod:`ddp_quant_hooks.kernels`):
            of integers, in blocks of a power of two.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A value is unknown.
    """

    format: Format
    block_size: int
    rotate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, str):
            raise TypeError(f"format must be a str, got {self.format!r}")
        if not is_integer(self.block_size):
            raise TypeError(f"block_size must be an int, got {self.block_size!r}")
        if self.format not in _BITS:
            raise ValueError(f"format must be one of {', '.join(_BITS)}, got {self.format!r}")
        if self.block_size not in range(_SMALLEST_BLOCK, _LARGEST_BLOCK + 1, _SMALLEST_BLOCK):
            raise ValueError(
                f"block_size must be a multiple of {_SMALLEST_BLOCK} up to {_LARGEST_BLOCK}, "
                f"got {self.block_size!r}"
            )
        if not isinstance(self.rotate, bool):
            raise TypeError(f"rotate must be True or False, got {self.rotate!r}")
        if self.rotate and not can_rotate(self.format, self.block_size):
            raise ValueError(
                "rotate needs integers in blocks of a power of two, "
                f"got {self.format!r} in blocks of {self.block_size!r}"
            )

    def blocks(self, values: int) -> int:
        """Return how many blocks ``values`` values fill."""
        return -(-values // self.block_size)

    def payload_bytes(self, values: int) -> int:
        """Return the bytes of the numbers, without scales."""
        return self.blocks(values) * self.block_size * _BITS[self.format] // 8

    def message_bytes(self, values: int) -> int:
        """Return the bytes of a message of ``values`` values."""
        return self.payload_bytes(values) + SCALE_BYTES * self.blocks(values)

    def scales(self, message: torch.Tensor, values: int) -> torch.Tensor:
        """Return the fp32 scales in a message: the largest magnitude of each block, NaN if not finite.

        For a rotated block, it is the largest magnitude of its rotated values, with a minus sign.
        """
        return message[self.payload_bytes(values) :].view(torch.float32)

    def join(self, messages: Sequence[torch.Tensor], lengths: Sequence[int], joined: torch.Tensor) -> None:
        """Join messages of neighboring values into one message of all of them, which holds the same bits.

        Args:
            messages: All except the last nonempty one consist of whole blocks.
            lengths: How many values each has.
            joined: The output, of the length of the joined message.
        """
        cuts = [self.payload_bytes(length) for length in lengths]
        payload = sum(cuts)
        torch.cat([message[:cut] for message, cut in zip(messages, cuts, strict=True)], out=joined[:payload])
        torch.cat([message[cut:] for message, cut in zip(messages, cuts, strict=True)], out=joined[payload:])
