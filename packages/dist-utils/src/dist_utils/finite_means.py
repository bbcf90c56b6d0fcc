"""Keep the mean of finite numbers finite where rounding alone would exceed a dtype's range.

W ranks average by adding up W shares, each a value divided by W. Shares and sums are rounded. At the end of
the range that may go one step too far: in fp16, 65504 / 3 rounds to 21840, and 3 * 21840 = 65520 rounds to
infinity.
"""

from __future__ import annotations

import torch

__all__ = ["held_mean", "held_shares", "held_sum", "hold_shares", "largest_share", "round_mean", "round_sum"]


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


def hold_shares(shares: torch.Tensor, world_size: int, *, unrounded: torch.Tensor | None = None) -> None:
    """Reduce shares that only rounding has made too large to :func:`largest_share`, in place.

    They are shares of values at the end of the range of the shares' dtype. Larger shares (of values beyond
    that range), infinities and NaN stay as they are.

    Args:
        shares: Dense, of a real floating-point dtype: values divided by ``world_size`` and rounded.
        world_size: How many ranks add up their shares, in the dtype of the shares.
        unrounded: The shares in fp32 or fp64, if available: faster to check.

    Cost:
        Nothing if ``world_size`` is a power of two, and on CPU for 3, 5, 7 in fp32 and 3, 5 in bf16.
        Otherwise one read of the shares on CPU (in fp32 half the time of the division), or a few elementwise
        kernels elsewhere.

    Example:
        >>> shares = torch.tensor([65504.0, 3.0, float("inf")], dtype=torch.float16) / 3
        >>> hold_shares(shares, 3)
        >>> shares
        tensor([2.1824e+04, 1.0000e+00,        inf], dtype=torch.float16)
    """
    if _is_power_of_two(world_size) or (shares.device.type == "cpu" and _divides(world_size, shares.dtype)):
        return
    limit = largest_share(shares.dtype, world_size)
    if not _known_within(shares if unrounded is None else unrounded, limit):
        shares.copy_(held_shares(shares, world_size))


def held_shares(shares: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return what :func:`hold_shares` writes; traceable by ``torch.compile``."""
    if _is_power_of_two(world_size):
        return shares
    limits = torch.finfo(shares.dtype)
    # A quotient may be a product with a rounded reciprocal, a few steps too large.
    rounded_up = limits.max / world_size * (1 + 4 * limits.eps)
    return _held(shares, largest_share(shares.dtype, world_size), rounded_up)


def round_sum(total: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
    """Round sums of shares to the narrower dtype that each share was rounded to.

    A sum that exceeds the range by no more than the rounding of its shares can explain becomes the largest
    finite number. A larger one overflows to infinity, and stays visible.

    Args:
        total: Sums of ``world_size`` shares that were rounded to ``out.dtype``; of a wider dtype.
        world_size: Number of shares.
        out: The output, of the same length as ``total``.

    Cost:
        A copy; also one read of ``total`` on CPU, or a few elementwise kernels elsewhere.

    Example:
        >>> out = torch.empty(2, dtype=torch.float16)
        >>> round_sum(torch.tensor([3 * 21840.0, 7e4]), 3, out)
        >>> out
        tensor([65504.,    inf], dtype=torch.float16)
    """
    within = _known_within(total, torch.finfo(out.dtype).max)
    out.copy_(total if within else held_sum(total, world_size, out.dtype))


def held_sum(total: torch.Tensor, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``total``, clamped to the range of ``dtype`` where :func:`round_sum` makes it finite."""
    limits = torch.finfo(dtype)
    a_step_each = world_size * limits.eps / 2
    return _held(total, limits.max, limits.max * (1 + a_step_each))


def round_mean(mean: torch.Tensor, out: torch.Tensor) -> None:
    """Write means of numbers of ``out.dtype`` that were computed in another dtype; finite means stay finite.

    Apart from rounding, they lie in the range of ``out.dtype``. Infinities and NaN stay.

    Args:
        mean: Of a floating-point dtype; if complex, of one with the range of ``out.dtype``.
        out: The output, of the same length as ``mean``.

    Cost:
        A copy. If ``mean.dtype`` has the wider range: also one read of ``mean`` on CPU, or a few elementwise
        kernels elsewhere.

    Example:
        >>> out = torch.empty(2, dtype=torch.float16)
        >>> round_mean(torch.tensor([65536.0, float("inf")]), out)
        >>> out
        tensor([65504.,    inf], dtype=torch.float16)
    """
    within = _range_fits(mean.dtype, out.dtype) or _known_within(mean, torch.finfo(out.dtype).max)
    out.copy_(mean if within else held_mean(mean, out.dtype))


def held_mean(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``mean``, clamped to the range of ``dtype`` where :func:`round_mean` makes it finite."""
    if _range_fits(mean.dtype, dtype):
        return mean
    wide = mean.to(torch.promote_types(mean.dtype, dtype))  # bf16 does not have fp16's largest number
    return _held(wide, torch.finfo(dtype).max, torch.finfo(wide.dtype).max)


def _range_fits(dtype: torch.dtype, wider: torch.dtype) -> bool:
    return torch.finfo(dtype).max <= torch.finfo(wider).max


def _known_within(values: torch.Tensor, limit: float) -> bool:
    """Return whether all magnitudes are at most ``limit``; ``False`` if that would block the host."""
    if values.device.type != "cpu" or values.numel() == 0:
        return values.numel() == 0
    if values.dtype in (torch.float32, torch.float64) and values.dim() == 1:
        # The root of the sum of squares is at least the largest magnitude, and takes a quarter of aminmax's
        # time.
        squares: float = torch.dot(values, values).item()
        if squares <= min(limit * limit, torch.finfo(values.dtype).max):
            return True
    lowest, highest = torch.aminmax(values)
    return -limit <= lowest.item() and highest.item() <= limit  # false with a NaN


def _held(values: torch.Tensor, limit: float, up_to: float) -> torch.Tensor:
    """Return ``values`` with magnitudes between ``limit`` and ``up_to`` reduced to ``limit``."""
    up_to = min(up_to, torch.finfo(values.dtype).max)
    return torch.where(values.abs() > up_to, values, values.clamp(-limit, limit))


def _divides(number: int, dtype: torch.dtype) -> bool:
    """Return whether shares of the largest number are exact. A GPU may round them: it multiplies by 1 / W."""
    return (2 / torch.finfo(dtype).eps - 1) % number == 0


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
