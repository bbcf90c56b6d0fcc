"""The kernels as torch operators: for every device, and the reference for the bits of the others.

Divisors are tensors: to divide by a number, torch may multiply by its reciprocal, which rounds twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from ddp_quant_hooks.kernels import rotation
from ddp_quant_hooks.kernels.affine import affine_decode, affine_encode
from ddp_quant_hooks.kernels.call import KernelCall
from ddp_quant_hooks.kernels.layout import Format, Layout
from ddp_quant_hooks.kernels.low_rank import run as run_on_factors

__all__ = ["affine_decode", "affine_encode", "run", "run_on_factors"]

_LEVELS = {"int8": 127.0, "int4": 7.0, "fp16": 1.0, "int1": 1.0}
_NAN_BITS = {torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}
_INFINITY_BITS = 0x7F800000
_SHRINK = 0.25
_LARGEST = torch.finfo(torch.float32).max
_PLACES = torch.arange(8, dtype=torch.uint8, device="cpu")
"""Of the signs in a byte: of four neighbors in the first half of a block, and of four in the second."""


@torch.no_grad()
def run(call: KernelCall) -> None:
    """Do a call; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
    lengths = list(call.lengths)
    parts, residuals, new_residuals = (
        [None] * len(lengths) if tensor is None else tensor.split_with_sizes(lengths)
        for tensor in (call.values, call.residual, call.new_residual)
    )
    for index, (count, part) in enumerate(zip(lengths, parts, strict=True)):
        if count == 0:
            continue
        if call.incoming:
            blocks = _mean(call.incoming[index], call.layout, count)
        else:
            assert part is not None
            blocks = _in_blocks(part.float(), call.layout)
        if call.outgoing:
            kept, lost = residuals[index], new_residuals[index]
            _encode_blocks(blocks, count, call.outgoing[index], call.new_layout, kept, lost)
        elif part is not None:
            _store(blocks.flatten()[:count], part)


def _store(mean: torch.Tensor, values: torch.Tensor) -> None:
    limits = torch.finfo(values.dtype)
    values.copy_(mean.clamp(limits.min, limits.max))  # a mean that was finite stays so; NaN stays
    if values.dtype in _NAN_BITS:  # torch's casts may turn a NaN into any other NaN
        values.view(torch.int16).masked_fill_(mean.isnan(), _NAN_BITS[values.dtype])


def _in_blocks(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    return pad(values, (0, -values.numel() % layout.block_size)).view(-1, layout.block_size)


def _encode_blocks(
    blocks: torch.Tensor,
    count: int,
    message: torch.Tensor,
    layout: Layout,
    residual: torch.Tensor | None,
    new_residual: torch.Tensor | None,
) -> None:
    levels = _LEVELS[layout.format]
    if residual is not None:
        # A finite value stays finite.
        total = (blocks + _in_blocks(residual.float(), layout)).clamp(-_LARGEST, _LARGEST)
        blocks = torch.where(blocks.isfinite(), total, blocks)
    # Compared as integers, of which a NaN is the largest.
    largest = blocks.abs().view(torch.int32).amax(1, keepdim=True)
    finite = largest < _INFINITY_BITS
    has_numbers = finite & (largest > 0)
    sent_scale = _mean_magnitude(blocks) if layout.format == "int1" else largest.view(torch.float32)
    scale = torch.where(finite, sent_scale, torch.nan)
    scaled = blocks if layout.format == "int1" else _scale(blocks, scale, levels)
    scaled = torch.where(has_numbers, scaled, 0.0)
    if layout.rotate:
        rotated, sent = rotation.rotate_where_it_pays(blocks, scale, levels)
        from_rotated = torch.where(sent < 0, _scale(rotated, -sent, levels), 0.0)
        scale, scaled = sent, torch.where(sent < 0, from_rotated, scaled)
    payload = _payload(scaled, layout.format)
    message[: payload.numel()] = payload
    layout.scales(message, count).copy_(scale.flatten())
    if new_residual is not None:
        numbers = _numbers(message, layout, count)
        restored = scale * (numbers * (1.0 / levels))
        if layout.rotate:
            turned = rotation.restore_factors(scale, layout) * (numbers * (1.0 / levels))
            restored = torch.where(scale < 0, rotation.restore(turned), restored)
        lost = (blocks - restored).to(new_residual.dtype)
        kept = torch.zeros_like(lost) if residual is None else _in_blocks(residual, layout)
        lost = torch.where(has_numbers, lost, torch.where(finite, 0.0, kept))
        new_residual.copy_(lost.flatten()[:count])


def _mean_magnitude(blocks: torch.Tensor) -> torch.Tensor:
    """Return the mean magnitude of each block, in a column: sums of values half of them apart."""
    sums = blocks.abs() * (1.0 / blocks.shape[1])
    while sums.shape[1] > 1:
        low, high = sums.chunk(2, 1)
        sums = low + high
    return sums


def _scale(blocks: torch.Tensor, scale: torch.Tensor, levels: float) -> torch.Tensor:
    one = torch.ones_like(scale)  # two Python numbers would give the default dtype
    shift = torch.where(scale < 2.0**-100, 2.0**64, torch.where(scale > 2.0**100, 2.0**-64, one))
    return (blocks * shift) * (torch.full_like(scale, levels) / (scale * shift))


def _mean(messages: Sequence[torch.Tensor], layout: Layout, count: int) -> torch.Tensor:
    ranks, step = len(messages), 1.0 / _LEVELS[layout.format]
    scales = torch.stack([layout.scales(message, count) for message in messages]).unsqueeze(2)
    finite = scales.isfinite().all(0)
    large = (scales.amax(0) >= 2.0**100) & (ranks > 1)  # their differences can overflow
    one = torch.ones((), dtype=torch.float32, device=scales.device)
    shrink = torch.where(large, _SHRINK, one)
    mean = torch.zeros((), dtype=torch.float32, device=scales.device)
    included = torch.zeros_like(shrink)  # how many ranks' blocks are in the mean
    are_rotated = scales.signbit() & layout.rotate
    for rotated in (True, False) if layout.rotate else (False,):
        for message, sent, is_rotated in zip(messages, scales, are_rotated, strict=True):
            scale = rotation.restore_factors(sent, layout) if rotated else sent
            value = (scale * shrink) * (_numbers(message, layout, count) * step)
            following = mean + (value - mean) * (one / (included + one))
            following = torch.where(included == 0, value, following)
            takes_part = is_rotated == rotated
            mean = torch.where(takes_part, following, mean)
            included = included + takes_part
        if rotated:
            mean = torch.where(included > 0, rotation.restore(mean), mean)
    grown = (mean * (1.0 / _SHRINK)).clamp(-_LARGEST, _LARGEST)
    return torch.where(finite, torch.where(large, grown, mean), torch.nan)


def _payload(scaled: torch.Tensor, kind: Format) -> torch.Tensor:
    """Return the bytes of numbers in blocks."""
    if kind == "fp16":
        return scaled.half().flatten().view(torch.uint8)
    if kind == "int1":
        bits = scaled.signbit().view(len(scaled), 2, -1, 4).transpose(1, 2).reshape(len(scaled), -1, 8)
        return (bits.to(torch.uint8) << _PLACES.to(scaled.device)).sum(2, dtype=torch.uint8).flatten()
    numbers = scaled.round().to(torch.int8).view(torch.uint8)
    if kind == "int4":
        low, high = numbers.chunk(2, 1)
        numbers = (low & 15) | (high << 4)
    return numbers.flatten()


def _numbers(message: torch.Tensor, layout: Layout, count: int) -> torch.Tensor:
    """Return the numbers in a message, in blocks, as fp32."""
    payload = message[: layout.payload_bytes(count)]
    if layout.format == "fp16":
        return payload.view(torch.float16).view(-1, layout.block_size).float()
    if layout.format == "int8":
        return payload.view(torch.int8).view(-1, layout.block_size).float()
    if layout.format == "int1":
        bits = (payload.view(-1, layout.block_size // 8, 1) >> _PLACES.to(payload.device)) & 1
        halves = bits.view(len(bits), -1, 2, 4).transpose(1, 2).reshape(len(bits), -1)
        return (-2.0 * halves.float()).add(1.0)
    both = payload.view(-1, layout.block_size // 2)
    halves = torch.cat([both & 15, both >> 4], 1)
    return (halves ^ 8).float() - 8.0
