"""Shares of the mean have finite sums, clamped ones up to the end of a range."""

import pytest
import torch

from ddp_compress_hooks.averaging import largest_share

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WORLD_SIZES = [1, 2, 3, 4, 5, 6, 7, 12, 24, 31, 48]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_largest_shares_add_up_to_a_finite_sum_in_every_order(dtype, world_size):
    share = torch.tensor(largest_share(dtype, world_size), dtype=dtype)
    assert share.item() == largest_share(dtype, world_size)
    # Rounding keeps order, so the largest sum of k shares is the largest of two smaller such sums.
    largest = [torch.zeros((), dtype=dtype), share]
    for count in range(2, world_size + 1):
        first = torch.stack(largest[1:])
        largest.append((first + first.flip(0)).max())
        assert len(largest) == count + 1
    assert largest[-1].isfinite()
    assert share.item() * world_size >= torch.finfo(dtype).max * (1 - world_size * torch.finfo(dtype).eps / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_shares_of_values_below_the_promised_limit_have_finite_sums(dtype, world_size):
    """The documented limit, with no help but the division before the rounding."""
    limits = torch.finfo(dtype)
    exact = world_size & (world_size - 1) == 0
    limit = limits.max if exact else limits.max * (1 - world_size * limits.eps / 2)
    values = torch.tensor([limit, -limit], dtype=torch.float64).to(dtype)
    values = torch.where(values.double().abs() > limit, values.nextafter(torch.zeros_like(values)), values)
    share = values / world_size
    for one in (share, values * (1 / world_size)):  # GPUs multiply by the reciprocal
        total = one.clone()
        for _ in range(world_size - 1):
            total += one
        assert total.isfinite().all()
        assert (one.double() * world_size).to(dtype).isfinite().all()
