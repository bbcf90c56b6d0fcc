"""Keep the mean of finite numbers finite where rounding alone would exceed a dtype's range.

W ranks average by adding up W shares, each a value divided by W. Shares and sums are rounded, which at the
end of the range may go one step too far: three times 65504 / 3 in fp16 is 3 * 21840 = 65520, an infinity.
"""

from __future__ import annotations

import torch

__all__ = ["held_mean", "held_shares", "held_sum", "hold_shares", "largest_share", "round_mean", "round_sum"]


def largest_share(dtype: torch.dtype, world_size: int) -> float:
    """Return a value of ``dtype`` of which ``world_size`` add up to a finite one, in any order of additions.

    Args:
        dtype: A floating-point dtype, in which sums are rounded to nearest.
        world_size: Number of shares.

    Returns:
        ``finfo(dtype).max / world_size`` for powers of two; for others less by at most a factor of
        ``1 - world_size * finfo(dtype).eps / 2``, and never less than half of it.

    Example:
        >>> largest_share(torch.float16, 3)
        21824.0
    """
    limits = torch.finfo(dtype)
    steps = 2 / limits.eps - 1  # so many times the largest step between neighbors is the largest number
    # Of multiples of that step every partial sum is exact.
    multiple = limits.max / steps * (steps // world_size)
    # A partial sum of k < 2^j copies of max / 2^j rounds to at most k 2^-j of the range, less one step.
    power = limits.max / float(1 << (world_size - 1).bit_length())
    return max(multiple, power)


def hold_shares(shares: torch.Tensor, world_size: int, *, unrounded: torch.Tensor | None = None) -> None:
    """Bring shares that are too large by rounding alone to :func:`largest_share`, in place.

    Those are the shares of values at the end of the range of the shares' dtype. Larger ones, which are
    shares of values that the dtype does not hold, infinities and NaN stay as they are.

    Args:
        shares: Dense, of a real floating-point dtype: values divided by ``world_size`` and rounded.
        world_size: How many ranks add up their shares, in the dtype of the shares.
        unrounded: The shares in fp32 or fp64, where they are at hand: faster to look at.

    Cost:
        Nothing if ``world_size`` is a power of two, and on CPU for 3, 5, 7 in fp32 and 3, 5 in bf16. Else one
        reading of the shares on CPU (in fp32 half the time of the division) and a few elementwise kernels
        elsewhere.

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
    # A quotient may be a product with a rounded reciprocal: some steps above the largest.
    rounded_up = limits.max / world_size * (1 + 4 * limits.eps)
    return _held(shares, largest_share(shares.dtype, world_size), rounded_up)


def round_sum(total: torch.Tensor, world_size: int, out: torch.Tensor) -> None:
    """Round sums of shares to a narrower dtype that each share has been rounded to.

    A sum that exceeds the range by no more than its shares may have been rounded up becomes the largest
    finite number; a larger one overflows to an infinity, and stays visible.

    Args:
        total: Sums of ``world_size`` shares that were rounded to ``out.dtype``; of a wider dtype.
        world_size: Number of shares.
        out: The output, as long as ``total``.

    Cost:
        A copy; on CPU one reading of ``total`` more, elsewhere a few elementwise kernels.

    Example:
        >>> out = torch.empty(2, dtype=torch.float16)
        >>> round_sum(torch.tensor([3 * 21840.0, 7e4]), 3, out)
        >>> out
        tensor([65504.,    inf], dtype=torch.float16)
    """
    within = _known_within(total, torch.finfo(out.dtype).max)
    out.copy_(total if within else held_sum(total, world_size, out.dtype))


def held_sum(total: torch.Tensor, world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return ``total`` with what :func:`round_sum` makes finite held in the range of ``dtype``."""
    limits = torch.finfo(dtype)
    a_step_each = world_size * limits.eps / 2
    return _held(total, limits.max, limits.max * (1 + a_step_each))


def round_mean(mean: torch.Tensor, out: torch.Tensor) -> None:
    """Write means of finite numbers of ``out.dtype``, computed in another dtype: finite ones stay finite.

    They lie in the range of ``out.dtype``, but for rounding. Infinities and NaN stay.

    Args:
        mean: Of a floating-point dtype; if complex, of one whose range ``out.dtype`` has.
        out: The output, as long as ``mean``.

    Cost:
        A copy. Where ``mean.dtype`` has the wider range: on CPU one reading of ``mean`` more, elsewhere a
        few elementwise kernels.

    Example:
        >>> out = torch.empty(2, dtype=torch.float16)
        >>> round_mean(torch.tensor([65536.0, float("inf")]), out)
        >>> out
        tensor([65504.,    inf], dtype=torch.float16)
    """
    within = _range_fits(mean.dtype, out.dtype) or _known_within(mean, torch.finfo(out.dtype).max)
    out.copy_(mean if within else held_mean(mean, out.dtype))


def held_mean(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``mean`` with what :func:`round_mean` makes finite held in the range of ``dtype``."""
    if _range_fits(mean.dtype, dtype):
        return mean
    wide = mean.to(torch.promote_types(mean.dtype, dtype))  # bf16 does not have fp16's largest number
    return _held(wide, torch.finfo(dtype).max, torch.finfo(wide.dtype).max)


def _range_fits(dtype: torch.dtype, wider: torch.dtype) -> bool:
    return torch.finfo(dtype).max <= torch.finfo(wider).max


def _known_within(values: torch.Tensor, limit: float) -> bool:
    """Return whether all magnitudes are at most ``limit``, if that needs no waiting for a device."""
    if values.device.type != "cpu" or values.numel() == 0:
        return values.numel() == 0
    if values.dtype in (torch.float32, torch.float64) and values.dim() == 1:
        # The root of their sum is at least the largest magnitude; found in a quarter of aminmax's time.
        squares: float = torch.dot(values, values).item()
        if squares <= min(limit * limit, torch.finfo(values.dtype).max):
            return True
    lowest, highest = torch.aminmax(values)
    return -limit <= lowest.item() and highest.item() <= limit  # not so with a NaN


def _held(values: torch.Tensor, limit: float, up_to: float) -> torch.Tensor:
    """Return ``values`` with magnitudes between ``limit`` and ``up_to`` brought to ``limit``."""
    up_to = min(up_to, torch.finfo(values.dtype).max)
    return torch.where(values.abs() > up_to, values, values.clamp(-limit, limit))


def _divides(number: int, dtype: torch.dtype) -> bool:
    """Return whether shares of the largest number are exact. A GPU may round them: it multiplies by 1 / W."""
    return (2 / torch.finfo(dtype).eps - 1) % number == 0


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
