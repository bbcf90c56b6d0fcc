"""Large, small and non-finite values: the mean at the limits of 16 bits."""

import math

import pytest
import torch
from hook_buckets import FOREIGN, HOOKS, make_bucket, run_hook
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ddp_compress_hooks import CompressState, bf16_compress_hook, fp16_compress_hook
from ddp_compress_hooks.averaging import largest_share
from dist_utils.testing import run_ranks

INF, NAN = float("inf"), float("nan")
FP16 = [name for name in HOOKS if "fp16" in name and name not in FOREIGN]


def _saturate(bucket, values, hook, accumulate):
    state = CompressState(accumulate=accumulate, saturate=True)
    bucket.set_buffer(torch.tensor(values))
    return hook(state, bucket).wait().tolist(), state.saturated


def _run(rank, world_size):
    bucket = make_bucket()
    seen = {"pytorch": {}}
    generator = torch.Generator().manual_seed(5)
    large = torch.stack([torch.randn(4096, generator=generator) * 3e4 for _ in range(world_size)])
    small = torch.stack([torch.randn(4096, generator=generator) * 1e-6 for _ in range(world_size)])
    for name in HOOKS:
        # finite shares of at most 65504 / W
        seen[name, "large"] = run_hook(name, bucket, large[rank].clamp(-65504, 65504))
        seen[name, "small"] = run_hook(name, bucket, small[rank].clone())
        mine = [1.0, 0.0, 3.0, 0.0] if rank else [NAN, INF, 1.0, -INF]
        seen[name, "special"] = run_hook(name, bucket, torch.tensor(mine))
    for hook in (default_hooks.fp16_compress_hook,):
        bucket.set_buffer(small[rank].clone())
        seen["pytorch"]["small"] = hook(None, bucket).wait()
    seen["exact"] = {"large": large.clamp(-65504, 65504).double().mean(0), "small": small.double().mean(0)}

    over = [7e4, -4e5, 1.0, 6e4] if rank == 0 else [7e4, 0.0, 1.0, 6e4]
    seen["saturate"] = {mode: _saturate(bucket, over, fp16_compress_hook, mode) for mode in ("wire", "fp32")}
    special = [NAN, INF, -INF, 1e38]
    seen["saturate special"] = {
        mode: _saturate(bucket, special, fp16_compress_hook, mode)[0] for mode in ("wire", "fp32")
    }
    top = [torch.finfo(torch.float32).max] * 2
    seen["saturate bf16"] = {
        mode: _saturate(bucket, top, bf16_compress_hook, mode)[0] for mode in ("wire", "fp32")
    }
    return seen


WORLD_SIZE = 4
# largest_share stays two epsilons below the limit, and its cast has an error of half an epsilon.
CLOSE_FP16 = 3 * torch.finfo(torch.float16).eps
CLOSE_BF16 = 3 * torch.finfo(torch.bfloat16).eps


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(_run, WORLD_SIZE, WORLD_SIZE, timeout=120)


@pytest.mark.parametrize("name", [name for name in HOOKS if name not in FOREIGN])
def test_a_finite_mean_of_values_in_range_is_finite(ranks, name):
    assert ranks[0][name, "large"].isfinite().all()


def test_pytorch_turns_the_same_values_infinite_where_it_casts_before_it_divides():
    """Show why the order of cast and division matters."""
    values = torch.tensor([7e4])
    assert (values.half() / 2).isinf().all()
    assert (values / 2).half().isfinite().all()


@pytest.mark.parametrize("name", HOOKS)
def test_nan_and_infinities_stay_visible(ranks, name):
    for rank in ranks:
        nan, inf, mean, minus = rank[name, "special"].tolist()
        assert math.isnan(nan)
        assert (inf, minus) == (INF, -INF)
        assert mean == pytest.approx((1 + 3 * (WORLD_SIZE - 1)) / WORLD_SIZE, rel=2**-7)


@pytest.mark.parametrize("name", FP16)
def test_small_gradients_are_no_worse_than_pytorchs(ranks, name):
    exact = ranks[0]["exact"]["small"]
    ours = (ranks[0][name, "small"].double() - exact).norm() / exact.norm()
    pytorch = (ranks[0]["pytorch"]["small"].double() - exact).norm() / exact.norm()
    assert ours <= pytorch


def test_fp32_sums_are_closer_than_sums_on_the_wire(ranks):
    exact = ranks[0]["exact"]["large"]
    error = {
        name: (ranks[0][name, "large"].double() - exact).norm()
        for name in ("bf16_compress_hook", "bf16_compress_hook/fp32")
    }
    assert error["bf16_compress_hook/fp32"] < error["bf16_compress_hook"]


def test_saturate_clamps_finite_values_and_counts_them(ranks):
    largest = torch.finfo(torch.float16).max
    for index, rank in enumerate(ranks):
        # fp32: the shares 7e4/4 and 1e5 against 65504: only rank 0 has one above it. The sum of the
        # first column is 7e4, which its owner clamps.
        (first, second, third, fourth), count = rank["saturate"]["fp32"]
        assert (first, second, third) == (largest, -largest, 1.0)
        assert fourth == pytest.approx(6e4, rel=2**-10)
        assert count == (2 if index == 0 else 0)
        # wire: every share is limited to a quarter of the range, so both 7e4 and 4e5 are clamped.
        (first, second, third, fourth), count = rank["saturate"]["wire"]
        assert first == pytest.approx(largest, rel=CLOSE_FP16)
        assert second == pytest.approx(-largest / WORLD_SIZE, rel=CLOSE_FP16)
        assert (third, fourth) == (1.0, pytest.approx(6e4, rel=2**-9))
        assert count == (2 if index == 0 else 1)


@pytest.mark.parametrize("mode", ["wire", "fp32"])
def test_saturate_leaves_what_was_not_finite(ranks, mode):
    nan, inf, minus, finite = ranks[1]["saturate special"][mode]
    assert math.isnan(nan)
    assert (inf, minus) == (INF, -INF)
    assert finite == pytest.approx(torch.finfo(torch.float16).max, rel=CLOSE_FP16)


@pytest.mark.parametrize("mode", ["wire", "fp32"])
def test_saturate_holds_at_the_end_of_fp32_too(ranks, mode):
    largest = torch.finfo(torch.bfloat16).max
    assert ranks[0]["saturate bf16"][mode] == pytest.approx([largest] * 2, rel=CLOSE_BF16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 5, 7, 64, 1000])
def test_no_order_of_summing_the_largest_shares_overflows(dtype, world_size):
    share = torch.tensor(largest_share(dtype, world_size), dtype=dtype)
    assert share.item() * world_size <= torch.finfo(dtype).max
    total = torch.zeros((), dtype=dtype)
    for _ in range(world_size):
        total = total + share
    assert total.isfinite()
    assert share.item() * world_size > 0.97 * torch.finfo(dtype).max
