"""Shares and sums at the end of a dtype's range."""

import itertools

import pytest
import torch

from dist_utils.finite_means import (
    held_mean,
    held_shares,
    held_sum,
    hold_shares,
    largest_share,
    round_mean,
    round_sum,
)

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
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 1000, 5000])
def test_only_shares_at_the_end_of_the_range_change(dtype, world_size):
    limit, largest = largest_share(dtype, world_size), torch.finfo(dtype).max
    ordinary = torch.randn(1000, dtype=torch.float64).mul_(limit / 8).clamp_(-limit, limit).to(dtype)
    special = torch.tensor([0.0, -0.0, limit, -limit, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    before = torch.cat([ordinary, special])
    for part in (before, ordinary, special[:4]):
        shares = part.clone()
        hold_shares(shares, world_size)
        assert torch.equal(shares.view(torch.uint8), part.view(torch.uint8))
    at_the_end = torch.tensor([largest, -largest, 1.0], dtype=dtype) / world_size
    shares = at_the_end.clone()
    hold_shares(shares, world_size)
    assert shares[:2].tolist() == [limit, -limit]
    assert shares[2] == at_the_end[2]
    assert torch.equal(held_shares(at_the_end, world_size), shares)
    shares = at_the_end.clone()
    unrounded = torch.tensor([largest, -largest, 1.0], dtype=torch.float64) / world_size
    hold_shares(shares, world_size, unrounded=unrounded)
    assert shares[:2].tolist() == [limit, -limit]
    beyond = torch.tensor([largest / world_size * 1.5], dtype=dtype)  # more than any rounding of the range
    assert torch.equal(held_shares(beyond, world_size), beyond)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 64])
def test_sums_of_rounded_shares_overflow_only_if_the_exact_sum_does(dtype, world_size):
    largest, eps = torch.finfo(dtype).max, torch.finfo(dtype).eps
    rounded_up = min(largest * (1 + world_size * eps / 4), torch.finfo(torch.float32).max)
    too_large = min(largest * (1 + world_size * eps), torch.finfo(torch.float32).max)
    total = torch.tensor([largest, -largest, rounded_up, torch.inf, torch.nan, 1.0, too_large])
    out = torch.empty(7, dtype=dtype)
    round_sum(total, world_size, out)
    assert out[:4].tolist() == [largest, -largest, largest, torch.inf]
    assert out[4].isnan()
    assert out[5] == 1.0
    assert out[6].isinf() or dtype == torch.bfloat16  # it has nearly all of fp32's range
    again = held_sum(total, world_size, dtype).to(dtype)
    assert torch.equal(again.view(torch.int16), out.view(torch.int16))
    ordinary = torch.randn(1000)
    out = torch.empty(1000, dtype=dtype)
    round_sum(ordinary, world_size, out)
    assert torch.equal(out, ordinary.to(dtype))


@pytest.mark.parametrize(("source", "dtype"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_a_mean_in_another_dtype_stays_finite(source, dtype):
    reach = min(torch.finfo(source).max, torch.finfo(dtype).max * 1.9)
    mean = torch.tensor([reach, -reach, 1.5, torch.inf, -torch.inf, torch.nan], dtype=source)
    out = torch.empty(6, dtype=dtype)
    round_mean(mean, out)
    assert out[:3].isfinite().all()
    assert out[2:5].tolist() == [1.5, torch.inf, -torch.inf]
    assert out[5].isnan()
    assert torch.equal(held_mean(mean, dtype).to(dtype).view(torch.uint8), out.view(torch.uint8))
