"""Means of every hook and dtype: in place, within the derived bound, finite, the same bits on all ranks."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hook_buckets import HOOKS, OURS, error_bound, make_bucket, run_hook, state_of

from ddp_compress_hooks import CompressState, allreduce_hook, bf16_compress_hook, fp16_compress_hook
from dist_utils.testing import run_ranks, same_on_all_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INF, NAN = torch.inf, torch.nan


def _inputs(world_size, dtype, size):
    """Return values of which every other is subnormal in fp16."""
    generator, scale = torch.Generator().manual_seed(size), torch.tensor([1.0, 1e-6]).repeat(size)[:size]
    return [(torch.randn(size, generator=generator) * scale).to(dtype) for _ in range(world_size)]


def _results(rank, dtypes, sizes):
    """The error of every mean, in units of its bound."""
    bucket, seen, states = make_bucket(), {}, {name: state_of(name) for name in HOOKS}
    for dtype, size, name in itertools.product(dtypes, sizes, HOOKS):
        inputs = _inputs(dist.get_world_size(), dtype, size)
        exact = sum(tensor.double() for tensor in inputs) / len(inputs)
        result = run_hook(name, bucket, inputs[rank].clone(), state=states[name])
        assert same_on_all_ranks(result), (name, dtype, size)
        seen[name, dtype, size] = ((result.double() - exact).abs() / error_bound(name, inputs)).max().item()
    return seen


# Several pieces of 16 bits; not divisible by the number of ranks; fewer elements than ranks.
@pytest.mark.parametrize(
    ("world_size", "dtypes", "sizes"), [(2, [torch.float32], [2_500_003]), (3, DTYPES, [10_003, 2])]
)
def test_the_mean_is_within_the_derived_bound_and_bitwise_equal_on_all_ranks(world_size, dtypes, sizes):
    for seen in run_ranks(_results, world_size, dtypes, sizes, timeout=120):
        assert len(seen) == len(dtypes) * len(sizes) * len(HOOKS)
        assert {case: excess for case, excess in seen.items() if not excess <= 1} == {}


def near_the_end(dtype, wire, world_size):
    """Return values near the end of the narrower range, and elsewhere.

    A share is rounded once, and so is each partial sum: each time by half a step at most.
    """
    narrow = min(torch.finfo(kind).max for kind in (dtype, wire))
    eps = max(torch.finfo(kind).eps for kind in (dtype, wire))
    largest = narrow * (1 - (world_size + 1) * eps)
    return [largest, -largest, largest * 0.75, 1.0]


def exact_mean(rows):
    """Return the mean in fp64, without overflow even for its largest numbers."""
    largest = torch.finfo(torch.float64).max
    return (rows / len(rows)).sum(0).clamp(-largest, largest)


def _in_range(rank):
    """Every combination of values near the end of a range."""
    world_size, bucket, seen = dist.get_world_size(), make_bucket(), {}
    states = {name: state_of(name) for name in OURS}
    for name, dtype, is_complex in itertools.product(OURS, DTYPES, (False, True)):
        if is_complex and dtype.itemsize == 2:
            continue
        wire = HOOKS[name][1] or dtype
        choices = near_the_end(dtype, wire, world_size)
        rows = torch.tensor(list(itertools.product(choices, repeat=world_size)), dtype=torch.float64).T
        inputs = rows.to(dtype)
        mine = inputs[rank].clone()
        mine = torch.view_as_complex(mine.view(-1, 2)) if is_complex else mine
        result = run_hook(name, bucket, mine, state=states[name])
        result = torch.view_as_real(result).flatten() if is_complex else result
        assert same_on_all_ranks(result), (name, dtype)
        # One rounding in the wire dtype per share and addition, at the end of the range.
        allowed = world_size * (torch.finfo(wire).eps + torch.finfo(dtype).eps) * inputs.double().abs().max()
        error = (result.double() - exact_mean(inputs.double())).abs().max()
        seen[name, dtype, is_complex] = (error / allowed).item()
    for dtype in (torch.bfloat16, torch.float32, torch.float64):  # torch cannot add sparse fp16
        values = torch.tensor([near_the_end(dtype, dtype, world_size)[0]], dtype=dtype)
        bucket.set_buffer(torch.sparse_coo_tensor([[0, 0]], torch.cat([values / 2, values / 2]), (1,)))
        mean = allreduce_hook(None, bucket).wait().to_dense()
        seen["sparse", dtype] = (mean.double() / values.double() - 1).abs().item() / torch.finfo(dtype).eps
    return seen


def _larger_than_the_wire(rank):
    """Values that partly exceed the wire dtype's range, with a mean inside it, summed in fp32."""
    world_size, bucket, seen = dist.get_world_size(), make_bucket(), {}
    for hook, wire in ((fp16_compress_hook, torch.float16), (bf16_compress_hook, torch.bfloat16)):
        largest, eps = torch.finfo(wire).max, torch.finfo(wire).eps
        # Shares that are rounded up in fp16 and bf16, with means near the end of the range.
        random = torch.rand(world_size, 20_000, generator=torch.Generator().manual_seed(3)).double()
        signs = torch.where(torch.arange(20_000) % 2 == 0, 1.0, -1.0)
        inputs = random / random.sum(0) * signs * largest * (1 - (world_size + 1) * eps)
        inputs = (inputs * (world_size if wire == torch.float16 else 1)).to(torch.float32)
        bucket.set_buffer(inputs[rank].clone())
        result = hook(CompressState(accumulate="fp32"), bucket).wait()
        error = (result.double() - exact_mean(inputs.double())).abs().max()
        seen[wire] = (error / ((world_size + 1) * eps * largest)).item()
    return seen


def _not_finite(rank):
    """Infinities and NaN of one rank, beside a finite mean; and means that no wire can hold."""
    world_size, bucket, seen = dist.get_world_size(), make_bucket(), {}
    states = {name: state_of(name) for name in HOOKS}
    for name, dtype in itertools.product(HOOKS, DTYPES):
        largest = near_the_end(dtype, HOOKS[name][1] or dtype, world_size)[0]
        special = [INF, -INF, NAN, largest] if rank == world_size - 1 else [largest] * 4
        *special, finite = run_hook(
            name, bucket, torch.tensor(special, dtype=dtype), state=states[name]
        ).tolist()
        seen[name, dtype] = [repr(value) for value in special], finite / largest
    bucket.set_buffer(torch.tensor([66_000.0, -66_000.0, 65_000.0]))
    return seen, fp16_compress_hook(CompressState(accumulate="fp32"), bucket).wait().tolist()


def _finite_and_not(rank):
    return {**_in_range(rank), **_larger_than_the_wire(rank)}, *_not_finite(rank)


@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(size, marks=pytest.mark.exhaustive) for size in (2, 4))]
)
def test_a_mean_of_finite_values_is_finite_and_what_is_not_finite_stays_visible(world_size):
    for errors, special, too_large in run_ranks(_finite_and_not, world_size, timeout=120):
        assert len(errors) == len(OURS) * (len(DTYPES) + 2) + 5
        assert {case: error for case, error in errors.items() if not error <= 1} == {}
        for case, (values, finite) in special.items():
            assert values == ["inf", "-inf", "nan"], case
            assert 0.9 < finite < INF, case
        assert too_large == [INF, -INF, 64_992.0]


def _saturated(rank):
    bucket, seen = make_bucket(), {}
    first = [7e4, -4e5, 1.0, 6e4] if rank == 0 else [7e4, 0.0, 1.0, 6e4]
    for mode in ("wire", "fp32"):
        for hook, values in (
            (fp16_compress_hook, first),
            (fp16_compress_hook, [NAN, INF, -INF, 1e38]),
            (bf16_compress_hook, [torch.finfo(torch.float32).max] * 2),
        ):
            state = CompressState(accumulate=mode, saturate=True)
            bucket.set_buffer(torch.tensor(values))
            mean = hook(state, bucket).wait().tolist()
            seen.setdefault(mode, []).append((mean, state.saturated))
    return seen


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_saturate_clamps_finite_values_counts_them_and_leaves_the_others(world_size):
    # A clamped share of the sum stays two epsilons below the limit; its cast has an error of half an epsilon.
    largest = {kind: torch.finfo(kind).max for kind in (torch.float16, torch.bfloat16)}
    close = {kind: 3 * torch.finfo(kind).eps for kind in largest}
    top = pytest.approx(largest[torch.float16], rel=close[torch.float16])
    for rank, seen in enumerate(run_ranks(_saturated, world_size)):
        for mode, ((mean, count), (special, _), (at_the_end, _)) in seen.items():
            # fp32: of the shares only 4e5 / W is above 65504, on rank 0, whose shard also has the sum of the
            # first column, 7e4. wire: every share is limited to 1 / W of the range: 7e4 and 4e5 are clamped.
            lowest = -largest[torch.float16] / (world_size if mode == "wire" else 1)
            assert mean[:3] == [top, pytest.approx(lowest, rel=close[torch.float16]), 1.0]
            assert mean[3] == pytest.approx(6e4, rel=2**-9)
            assert count == (2 if rank == 0 else mode == "wire")
            assert math.isnan(special[0])
            assert special[1:] == [INF, -INF, top]
            assert at_the_end == [pytest.approx(largest[torch.bfloat16], rel=close[torch.bfloat16])] * 2
