"""The message format: blocks of numbers with few bits, and one scale per block, in one message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch

WIRE_VERSION = 5
"""Version of the message format and of how values are chunked and sharded, equal on all ranks."""

Format: TypeAlias = Literal["int8", "int4", "fp16", "int1", "bfloat16", "float16"]
"""What a value becomes, relative to the largest magnitude of its block: an integer from -127 to 127 or
from -7 to 7, or a 16-bit float from -1 to 1. With ``"int1"``: its sign, relative to the mean magnitude. With
``"bfloat16"`` and ``"float16"``: itself, in 16 bits, relative to nothing."""

_BITS = {"int8": 8, "int4": 4, "fp16": 16, "int1": 1, "bfloat16": 16, "float16": 16}
_FLOATS: dict[str, torch.dtype] = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024)
SCALE_BYTES = 4
ALIGNMENT = 16
"""Messages begin at multiples of so many bytes, where GPUs read and write most at a time."""


def is_integer(number: object) -> bool:
    """Return whether ``number`` is an int. ``True`` is not one."""
    return isinstance(number, int) and not isinstance(number, bool)


@dataclass(frozen=True)
class Layout:
    """The layout of a message: ``[payload][one fp32 scale per block]``, without a header.

    Values that are relative to nothing have no scales. A message is a multiple of 16 bytes long; nothing is
    ever written or read behind the last scale.

    Args:
        format: The format of the payload's numbers.
        block_size: Values per block: a power of two from 32 to 1024. The last block is filled with zeros.
        rotate: Whether blocks with a few large values are rotated first (:mod:`ddp_quant_hooks.kernels`):
            of integers only.

    Raises:
        TypeError: ``block_size`` is not an int.
        ValueError: A value is unknown.
    """

    format: Format
    block_size: int
    rotate: bool = False

    def __post_init__(self) -> None:
        if not is_integer(self.block_size):
            raise TypeError(f"block_size must be an int, got {self.block_size!r}")
        if self.format not in _BITS:
            raise ValueError(f"format must be one of {', '.join(_BITS)}, got {self.format!r}")
        if self.block_size not in _BLOCK_SIZES:
            raise ValueError(f"block_size must be one of {_BLOCK_SIZES}, got {self.block_size!r}")
        if self.rotate and self.format not in {"int8", "int4"}:
            raise ValueError(f"rotate needs a format of integers, got {self.format!r}")

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """The dtype of values that are relative to nothing; ``None`` if they are relative to their blocks."""
        return _FLOATS.get(self.format)

    def blocks(self, values: int) -> int:
        """Return how many blocks ``values`` values fill."""
        return -(-values // self.block_size)

    def payload_bytes(self, values: int) -> int:
        """Return the bytes of the numbers, without scales."""
        if self.dtype is not None:
            return values * self.dtype.itemsize
        return self.blocks(values) * self.block_size * _BITS[self.format] // 8

    def message_bytes(self, values: int) -> int:
        """Return the bytes of a message of ``values`` values."""
        scales = 0 if self.dtype is not None else self.blocks(values)
        length = self.payload_bytes(values) + SCALE_BYTES * scales
        return -(-length // ALIGNMENT) * ALIGNMENT  # so that the next message is aligned too

    def scales(self, message: torch.Tensor, values: int) -> torch.Tensor:
        """Return the fp32 scales in a message: the largest magnitude of each block, NaN if not finite.

        For a rotated block, it is the largest magnitude of its rotated values, with a minus sign; with
        ``"int1"``, the mean magnitude. A message of values that are relative to nothing has none.
        """
        start = self.payload_bytes(values)
        return message[start : start + SCALE_BYTES * self.blocks(values)].view(torch.float32)
