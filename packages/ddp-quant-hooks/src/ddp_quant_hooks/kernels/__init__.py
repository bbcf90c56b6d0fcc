"""Quantize, average and restore values in blocks: one interface, several backends, the same bits.

Every function is an operator of torch too (:mod:`ddp_quant_hooks.kernels.operators`), so ``torch.compile``
keeps it in its graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.kernels.choice import backend_for, describe
from ddp_quant_hooks.kernels.operators import VALUE_DTYPES, operators
from ddp_quant_hooks.wire_format import Layout, is_integer

__all__ = [
    "VALUE_DTYPES",
    "AffineLayout",
    "Layout",
    "affine_decode",
    "affine_encode",
    "backend_for",
    "decode",
    "decode_shards",
    "describe",
    "encode",
    "encode_shards",
    "reduce",
]


def encode(
    values: torch.Tensor,
    message: torch.Tensor,
    layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantize values to a message.

    Each block is divided by its largest magnitude and rounded to the nearest number of the format. A
    block with a NaN or an infinity gets the scale NaN.

    With ``layout.rotate`` a block is rotated first if fewer than a third of its values (8 bits; half, with 4)
    are above a quarter of the largest, and if that makes its step smaller: its values get fixed random signs
    and then the Walsh-Hadamard transform, so that a few large values do not cost the others their accuracy. A
    block is never rotated if one of its values is zero, or if the largest is not between 2^-100 and 2^100.

    Args:
        values: Flat and contiguous; fp32, bf16 or fp16.
        message: The output; uint8, ``layout.message_bytes(values.numel())`` long.
        layout: Of the message.
        residual: Added to the values first; fp32 or bf16, of the same length.
        new_residual: The output for the rounding error of the sum; of the same dtype, without memory in
            common with ``residual``. For a block that is not finite, ``residual`` again, or zero.

    Raises:
        TypeError, ValueError: A tensor has the wrong dtype, length or device, or gaps; or starts in the
            middle of a number (messages: of four bytes); or what is written shares memory with something
            else. Nothing is written then, whichever backend would run.
        RuntimeError: What would be written requires grad, and gradients are recorded: the kernels have none.
    """
    encode_shards(values, [message], layout, residual=residual, new_residual=new_residual)


def encode_shards(
    values: torch.Tensor,
    messages: Sequence[torch.Tensor],
    layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantize each shard of the values to a message of its own; on a GPU in one launch.

    Args:
        values: As for :func:`encode`.
        messages: The output; one for each shard as :func:`ddp_quant_hooks.chunks.shards` cuts the values,
            at block boundaries.
        layout: Of the messages.
        residual: As for :func:`encode`, of all values.
        new_residual: As for :func:`encode`, of all values.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message.
    """
    shape = (layout.format, layout.block_size)
    operators.encode(values, list(messages), *shape, residual, new_residual, layout.rotate)


def reduce(
    messages: Sequence[torch.Tensor],
    layout: Layout,
    values: int,
    message: torch.Tensor,
    message_layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantize the mean of several messages' values again.

    The mean is computed in fp32, in the order of ``messages``, except that messages with a rotated block come
    first. A block that is not finite in one of them is NaN.

    Args:
        messages: At least one, from :func:`encode`.
        layout: Of ``messages``.
        values: How many values are in each; at least 0.
        message: The output; uint8. It may be one of ``messages`` if the layouts are equal.
        message_layout: Of ``message``; the same block size as ``layout``.
        residual: As for :func:`encode`, of the mean.
        new_residual: As for :func:`encode`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message, or unequal block sizes.
    """
    if layout.block_size != message_layout.block_size:
        raise ValueError(
            f"the block sizes must be equal, got {layout.block_size} and {message_layout.block_size}"
        )
    if not is_integer(values):
        raise TypeError(f"values must be an int, got {values!r}")
    shape = (layout.format, values, message, message_layout.format, layout.block_size)
    operators.reduce(list(messages), *shape, residual, new_residual, layout.rotate, message_layout.rotate)


def decode(messages: Sequence[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
    """Restore the mean of one or more messages' values.

    Args:
        messages: At least one, from :func:`encode` or :func:`reduce`.
        layout: Of ``messages``.
        values: The output; flat and contiguous; fp32, bf16 or fp16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message.
    """
    operators.decode(list(messages), layout.format, layout.block_size, values, layout.rotate)


def decode_shards(messages: Sequence[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
    """Restore values whose shards have a message each, in one launch.

    Args:
        messages: One for each shard, as for :func:`encode_shards`.
        layout: Of ``messages``.
        values: As for :func:`decode`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`decode`.
    """
    operators.decode_shards(list(messages), layout.format, layout.block_size, values, layout.rotate)


def affine_encode(values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
    """Quantize values to a message of PyTorch's 8-bit numbers.

    Args:
        values: Flat and contiguous; fp32, bf16, fp16 or fp64.
        message: The output; uint8, ``layout.message_bytes`` long.
        layout: Of the message.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`.
    """
    _require_length(values, layout)
    operators.affine_encode(values, message, layout.channel)


def affine_decode(messages: Sequence[torch.Tensor], layout: AffineLayout, values: torch.Tensor) -> None:
    """Restore the mean of the messages' values. A channel that is not finite on any rank is NaN.

    Args:
        messages: From :func:`affine_encode`.
        layout: Of ``messages``.
        values: The output; flat and contiguous; fp32, bf16, fp16 or fp64.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`.
    """
    _require_length(values, layout)
    operators.affine_decode(list(messages), layout.channel, values)


def _require_length(values: torch.Tensor, layout: AffineLayout) -> None:
    """Raise unless the number of values is the layout's: messages of a few more have the same length."""
    if values.numel() != layout.values:
        raise ValueError(f"values must be {layout.values} long, as the layout says, got {values.numel()}")
