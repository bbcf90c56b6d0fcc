"""Every hook, every bucket dtype: the mean, in place, in the bucket's dtype, the same bits on every rank."""

import pytest
import torch
from hook_buckets import HOOKS, error_bound, make_bucket, run_hook

from dist_utils.testing import run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Several 16-bit pieces, not divisible by the world size; and fewer elements than ranks.
SIZES = {"large": [5_000_003, 2], "small": [100_003, 2]}


def _inputs(world_size, dtype, size):
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator).to(dtype) for _ in range(world_size)]


def _run_all(rank, world_size, sizes):
    bucket = make_bucket()
    seen = {}
    for dtype in DTYPES:
        for size in SIZES[sizes]:
            inputs = _inputs(world_size, dtype, size)
            exact = sum(tensor.double() for tensor in inputs) / world_size
            for name in HOOKS:
                result = run_hook(name, bucket, inputs[rank].clone())
                excess = ((result.double() - exact).abs() / error_bound(name, inputs)).max().item()
                bits = result.view(torch.uint8).sum(dtype=torch.int64).item()
                sample = result[:: max(1, size // 1000)].clone()
                seen[name, dtype, size] = (excess, bits, sample)
    return seen


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((world_size, sizes), id=f"{world_size}-{sizes}", marks=marks)
        for sizes, marks in (("small", ()), ("large", pytest.mark.exhaustive))
        for world_size in (2, 3)
    ],
)
def ranks(request):
    world_size, sizes = request.param
    return run_ranks(_run_all, world_size, world_size, sizes, timeout=600), SIZES[sizes]


@pytest.mark.parametrize("name", HOOKS)
def test_mean_within_the_derived_bound_and_bitwise_equal(ranks, name):
    results_of_ranks, sizes = ranks
    for dtype in DTYPES:
        for size in sizes:
            (_, bits, sample), *others = results = [rank[name, dtype, size] for rank in results_of_ranks]
            assert all(excess <= 1 for excess, _, _ in results), (dtype, size)
            for _, other_bits, other_sample in others:
                assert bits == other_bits
                assert torch.equal(sample, other_sample)
