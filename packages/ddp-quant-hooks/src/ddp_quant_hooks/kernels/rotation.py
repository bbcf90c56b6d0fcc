"""Which blocks are rotated before they are encoded, and how, as torch operators; see csrc/rotation.h."""

from __future__ import annotations

import functools

import torch

from ddp_quant_hooks.kernels.layout import Layout

_PEAK = 0.25
_PEAKED = {127.0: 3, 7.0: 2}


def rotate_where_it_pays(
    blocks: torch.Tensor, scale: torch.Tensor, levels: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all blocks rotated, and the scales to send: negative for blocks that are sent rotated.

    Args:
        blocks: Values, one block a row.
        scale: The largest magnitude of each block, in a column; NaN if not finite.
        levels: The largest number of the format.
    """
    size = blocks.shape[1]
    log2 = size.bit_length() - 1
    above = (blocks.abs() > scale * _PEAK).sum(1, keepdim=True)
    peaked = above * _PEAKED[levels] < size
    allowed = (blocks != 0).all(1, keepdim=True) & (scale >= 2.0**-100) & (scale <= 2.0**100)
    rotated = _transform(blocks * _signs(size, blocks.device))
    largest = rotated.abs().amax(1, keepdim=True)
    root = torch.full_like(scale, 2.0 ** (log2 // 2) * (2.0**0.5 if log2 % 2 else 1.0))
    return rotated, torch.where(peaked & allowed & (largest < scale * root), -largest, scale)


def restore_factors(scale: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the factors that the numbers of rotated blocks need before :func:`restore`."""
    return -scale * (1.0 / layout.block_size)


def restore(rotated: torch.Tensor) -> torch.Tensor:
    """Undo the rotation of blocks, given rotated values divided by the block size."""
    return _transform(rotated) * _signs(rotated.shape[1], rotated.device)


def _transform(blocks: torch.Tensor) -> torch.Tensor:
    size, step = blocks.shape[1], 1
    while step < size:
        low, high = blocks.view(-1, size // (2 * step), 2, step).unbind(2)
        blocks = torch.stack([low + high, low - high], 2).view(-1, size)
        step *= 2
    return blocks


@functools.cache
def _signs(size: int, device: torch.device) -> torch.Tensor:
    return signs(size, device)


def signs(size: int, device: torch.device) -> torch.Tensor:
    """Return 1 and -1 by a hash of the index, which begins at 1."""
    index = torch.arange(1, size + 1, dtype=torch.int64, device="cpu")  # not the default device
    value = _low(index, 0x9E3779B1)
    value = _low(value ^ (value >> 15), 0x85EBCA6B)
    value = _low(value ^ (value >> 13), 0xC2B2AE35)
    return (value >> 31).mul(-2).add(1).to(torch.float32).to(device)


def _low(value: torch.Tensor, factor: int) -> torch.Tensor:
    """Return the product's lowest 32 bits, which int64 keeps even when it overflows."""
    return (value * factor) & 0xFFFFFFFF
