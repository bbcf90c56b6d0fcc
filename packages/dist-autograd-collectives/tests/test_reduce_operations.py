"""Reduce operations and dtypes: values at the ends of a range, ties, NaNs, and what has no meaning."""

import itertools

import pytest
import torch
from torch.distributed import ReduceOp

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.short

INF, NAN = float("inf"), float("nan")
# Both ranks' values, and the gradients of the sum of their losses.
EXTREMES = {
    "max": ([NAN, NAN, 2.0, 1.0], [1.0, NAN, 2.0, NAN], [2, 1, 1, 0], [0, 1, 1, 2]),
    "min": ([NAN, NAN, 2.0, 1.0], [1.0, NAN, 2.0, NAN], [2, 1, 1, 0], [0, 1, 1, 2]),
    # Never a quotient of the product and the value.
    "product": ([1e-30, 1e30, INF, 0.0], [1e-30, 1e30, 2.0, 1.0], [2e-30, 2e30, 4, 2], [2e-30, 2e30, INF, 0]),
}


def _gradients(rank):
    found = {}
    for op, values in EXTREMES.items():
        x = torch.tensor(values[rank], requires_grad=True)
        dac.all_reduce(x, op).sum().backward()
        found[op] = x.grad.tolist()
    return found


def test_gradients_of_ties_nans_zeros_and_infinities():
    for rank, found in enumerate(run_ranks(_gradients, 2)):
        for op, values in EXTREMES.items():
            # The decimal numbers are rounded to float32, and there is one product.
            assert found[op] == pytest.approx(values[2 + rank], rel=2**-22), op


REFUSED = [
    ("bor", torch.float32, "BOR has no meaning for torch.float32, and no gradient"),
    ("max", torch.complex64, "complex numbers have no order"),
    ("median", torch.float32, "got 'median'"),
    ("avg", torch.bool, "AVG has no meaning for torch.bool"),
    ("avg", torch.uint64, "AVG has no meaning for torch.uint64"),
    ("min", torch.uint64, "MIN has no meaning for torch.uint64"),
]


def _integers(rank):
    for op, dtype, text in REFUSED:
        with pytest.raises(TypeError, match=text):
            dac.all_reduce(torch.ones(2, dtype=dtype), op)
    x = torch.tensor([1 + rank, 3])
    operations = ("sum", "avg", "max", ReduceOp.PRODUCT, "band", ReduceOp.BOR, "bxor")
    return {str(op): dac.all_reduce(x, op).tolist() for op in operations} | {
        "object": dac.all_reduce(x, ReduceOp(ReduceOp.PRODUCT)).tolist(),
        "uint8": dac.all_reduce(torch.full((2,), 200 + 2 * rank, dtype=torch.uint8), "avg").tolist(),
        "uint32": dac.all_reduce(torch.full((2,), 2**31 + 4, dtype=torch.uint32), "avg").tolist(),
    }


def test_operations_on_integers_and_what_has_no_meaning():
    for found in run_ranks(_integers, 2, group_timeout=30):
        sums = {"sum": [3, 6], "avg": [1, 3], "max": [2, 3], str(ReduceOp.PRODUCT): [2, 9]}
        bits = {"band": [0, 3], str(ReduceOp.BOR): [3, 3], "bxor": [3, 0]}
        assert found == sums | bits | {"object": [2, 9], "uint8": [201, 201], "uint32": [2**31 + 4] * 2}


SUMS_OF_GLOO = 40_002  # more than 64 KiB in 16 bits
MEANS = [*itertools.product([torch.float16, torch.bfloat16], [6, SUMS_OF_GLOO])]
MEANS += [(dtype, 6) for dtype in (torch.float32, torch.float64, torch.complex32, torch.complex128)]


def _largest_means(rank):
    """Three ranks hold a number a few steps below the largest, which rounding cannot make infinite."""
    wrong = []
    for dtype, count in MEANS:
        limits = torch.finfo(dtype)
        largest = limits.max * (1 - 2 * limits.eps)
        part = torch.full((count,), largest, dtype=dtype).real
        x = (torch.complex(part, -part) if dtype.is_complex else part).detach().requires_grad_()
        mean, one = dac.all_reduce(x, "avg"), dac.reduce(x, 1, "avg")
        found = {"all_reduce": mean, "part": dac.reduce_scatter_dim(x, "avg")}
        found |= {"one": one} if rank == 1 else {}
        (found["gradient"],) = torch.autograd.grad(mean, x, torch.ones_like(mean))
        for name, values in found.items():
            right = 1.0 if name == "gradient" else largest
            parts = values.abs().detach()
            if dtype.is_complex and name != "gradient":
                parts = torch.view_as_real(values.detach())
            # A share is too small by at most 3 eps / 2, and each of two sums by eps / 2.
            if not ((parts.abs().double() - right).abs() <= 4 * limits.eps * right).all():
                wrong.append((dtype, count, name, parts[0].tolist()))
    return wrong, dac.all_reduce(torch.tensor([INF, -INF, NAN, 1.0]), "avg").nan_to_num(
        5.0, 6.0, 7.0
    ).tolist()


def test_a_finite_mean_does_not_overflow_on_the_way():
    assert run_ranks(_largest_means, 3) == [([], [6, 7, 5, 1])] * 3


def _halves(rank):
    """Ones that bfloat16 loses if it adds them to 256 one by one."""
    x = torch.tensor([256.0 if rank == 0 else 1.0] * 3, dtype=torch.bfloat16)
    return [dac.all_reduce(x)[0].item(), dac.reduce_scatter_dim(x).item(), dac.reduce(x, 1)[0].item()]


def test_sums_of_few_halves_are_rounded_once():
    assert run_ranks(_halves, 3) == [[258, 258, 258 if rank == 1 else 0] for rank in range(3)]


RARE = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.int16, torch.int8]
RARE += [torch.uint8, torch.bool]
CALLS = {
    "all_reduce": dac.all_reduce,
    "reduce": lambda x: dac.reduce(x, 0),
    "reduce_scatter_dim": dac.reduce_scatter_dim,
    "max": lambda x: dac.all_reduce(x, "max"),
    "product": lambda x: dac.all_reduce(x, "product"),
    "coalesced": lambda x: dac.all_reduce_coalesced([x, x])[1],
    "broadcast": lambda x: dac.broadcast(x, 0),
    "gather": lambda x: torch.stack(dac.gather(x, 0)),
    "scatter": lambda x: dac.scatter([x, x], 1),
    "all_gather_cat": dac.all_gather_cat,
    "all_to_all_single": lambda x: dac.all_to_all_single(torch.empty_like(x), x),
    "permute": lambda x: dac.permute(x, [(0, 1)]),
}


def _rare_dtypes(rank):
    """Small whole numbers, which every dtype represents: the same results as with float64, bit by bit."""
    wrong = {}
    numbers = torch.tensor([1.0, 2, 0, 3]) if rank else torch.tensor([2.0, 1, 1, 0])
    long = [(dtype, 20_000) for dtype in (torch.float8_e5m2, torch.int16, torch.bool)]
    for dtype, count in [*((dtype, 1) for dtype in RARE), *long]:
        x = numbers.repeat(count).to(dtype)
        for name, call in CALLS.items():
            right = call(x.to(torch.uint8 if dtype is torch.bool else torch.float64)).to(dtype)
            ways = [call]
            if dtype in (torch.float8_e5m2, torch.int16) and name in ("all_reduce", "gather") and count == 1:
                torch._dynamo.reset()
                ways.append(torch.compile(call, backend="aot_eager", fullgraph=True))
            for way in ways:
                if not torch.equal(found := way(x).view(torch.uint8), right.view(torch.uint8)):
                    wrong[dtype, count, name, way is call] = found.tolist()[:8], right.tolist()[:8]
    for dtype in RARE[:2]:
        limits = torch.finfo(dtype)
        least = torch.tensor(limits.smallest_normal * limits.eps).to(dtype)
        mean = dac.all_reduce(least, "avg")  # half of the least number would be rounded to 0
        if mean.float() != least.float():
            wrong[dtype, "mean"] = mean.item(), least.item()
    uneven = dac.all_gather_cat(torch.ones(2 + rank).to(torch.float8_e5m2), sizes=[2, 3])
    leaf = torch.ones(2).to(torch.float8_e5m2).requires_grad_()
    dac.broadcast(leaf, 0).float().sum().backward()
    return wrong, uneven.float().tolist(), leaf.grad.float().tolist()


def test_rare_dtypes_are_moved_and_reduced_on_every_rank():
    first, second = run_ranks(_rare_dtypes, 2, timeout=170, group_timeout=30)
    assert first == ({}, [1.0] * 5, [2, 2])
    assert second == ({}, [1.0] * 5, [0, 0])
