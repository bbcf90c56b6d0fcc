"""Means of finite numbers that stay finite, whatever is rounded on the way.

W ranks average by adding up W shares: each divides its value first, in the value's own precision or a wider
one, and rounds the quotient to the dtype that is sent. This alone keeps every sum of shares finite, in any
order, for values up to ``finfo(dtype).max * (1 - W * finfo(dtype).eps / 2)``; if W is a power of two, up to
the largest number. Above that, rounding may add up to an infinity: in fp16, 65504 / 3 rounds to 21840, and
3 * 21840 = 65520 rounds to infinity. The two functions here are for what dividing first does not cover.
"""

from __future__ import annotations

import torch

__all__ = ["clamp_mean", "largest_share"]


def clamp_mean(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return means of numbers of ``dtype`` that were computed in another dtype, clamped to its range.

    Use it before a cast to ``dtype`` wherever more was rounded than a division and a sum: in bf16 the mean of
    fp16 numbers may be 65536, and what a quantized exchange carries over from the last step may lift a mean
    above every value. Infinities and NaN stay.

    Args:
        mean: Of a floating-point dtype; if complex, of one with the range of ``dtype``.
        dtype: The dtype of the numbers, to which the caller casts.

    Returns:
        ``mean`` itself if its dtype has no wider range.

    Cost:
        Nothing if the range of ``mean.dtype`` is no wider; otherwise a few elementwise kernels.

    Example:
        >>> clamp_mean(torch.tensor([65536.0, float("inf")]), torch.float16).half()
        tensor([65504.,    inf], dtype=torch.float16)
    """
    largest = torch.finfo(dtype).max
    if torch.finfo(mean.dtype).max <= largest:
        return mean
    wide = mean.to(torch.promote_types(mean.dtype, dtype))  # bf16 does not have fp16's largest number
    return torch.where(wide.isinf(), wide, wide.clamp(-largest, largest))


def largest_share(dtype: torch.dtype, world_size: int) -> float:
    """Return a value of ``dtype`` such that ``world_size`` copies of it have a finite sum, in any order.

    Args:
        dtype: A floating-point dtype, in which sums are rounded to nearest.
        world_size: Number of shares.

    Returns:
        ``finfo(dtype).max / world_size`` for powers of two; otherwise at least ``1 - world_size *
        finfo(dtype).eps / 2`` times that, and at least half of it.

    Example:
        >>> largest_share(torch.float16, 3)
        21824.0
    """
    limits = torch.finfo(dtype)
    steps = 2 / limits.eps - 1  # the largest number, in units of the largest step between neighbors
    # Partial sums of multiples of that step are exact.
    multiple = limits.max / steps * (steps // world_size)
    # A partial sum of k < 2^j copies of max / 2^j rounds to at most k 2^-j of the range, less one step.
    power = limits.max / float(1 << (world_size - 1).bit_length())
    return max(multiple, power)
