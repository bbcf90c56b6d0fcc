"""Values that are easy to get wrong: near the ends of a range, and of dtypes that backends lack."""

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils import free_storage
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.short

INF = float("inf")
# Both ranks' values, and the gradients of the sum of their losses.
PRODUCTS = [
    ([1e-30], [1e-30], [2e-30], [2e-30]),
    ([1e30], [1e30], [2e30], [2e30]),
    ([INF], [2.0], [4.0], [INF]),
    ([1e-30, 0.0], [1e-30, 1.0], [2e-30, 2.0], [2e-30, 0.0]),
]


def _products(rank):
    found = []
    for *values, _, _ in PRODUCTS:
        x = torch.tensor(values[rank], requires_grad=True)
        dac.all_reduce(x, "product").sum().backward()
        found.append(x.grad.tolist())
    return found


def test_the_gradient_of_a_product_is_never_a_quotient():
    first, second = run_ranks(_products, 2)
    for index, (_, _, *right) in enumerate(PRODUCTS):
        # The decimal numbers are rounded to float32, and there is one product.
        assert first[index] == pytest.approx(right[0], rel=2**-22)
        assert second[index] == pytest.approx(right[1], rel=2**-22)


def _means(rank):
    small, large = (torch.full((count,), 60000.0, dtype=torch.float16) for count in (3, 100_000))
    return {
        "small": dac.all_reduce(small, "avg").unique().tolist(),
        "large": dac.all_reduce(large, "avg").unique().tolist(),
        "part": dac.reduce_scatter_dim(large, "avg").unique().tolist(),
        "one": dac.reduce(large, 0, "avg").unique().tolist(),
        "uint8": dac.all_reduce(torch.full((2,), 200 + 2 * rank, dtype=torch.uint8), "avg").tolist(),
    }


def test_a_finite_mean_does_not_overflow_on_the_way():
    first, second = run_ranks(_means, 2)
    for found in (first, second):
        assert found["small"] == found["large"] == found["part"] == [60000.0]
        assert found["uint8"] == [201, 201]
    assert (first["one"], second["one"]) == ([60000.0], [0.0])


def _largest_means(rank):
    """Three ranks hold a number a few steps below the largest, which rounding cannot make infinite."""
    wrong = []
    sums_of_gloo = 40_002  # more than 64 KiB
    for dtype, count in [
        *((torch.float16, 6), (torch.float16, sums_of_gloo), (torch.bfloat16, 6), (torch.float32, 6)),
        *((torch.float64, 6), (torch.complex32, 6), (torch.complex128, 6)),
    ]:
        limits = torch.finfo(dtype)
        largest = limits.max * (1 - 2 * limits.eps)
        part = torch.full((count,), largest, dtype=dtype).real
        x = (torch.complex(part, -part) if dtype.is_complex else part).detach().requires_grad_()
        found = {
            "all_reduce": dac.all_reduce(x, "avg"),
            "reduce": dac.reduce(x, 1, "avg"),
            "part": dac.reduce_scatter_dim(x, "avg"),
        }
        for name, mean in found.items():
            parts = torch.view_as_real(mean.detach()) if dtype.is_complex else mean.detach()
            # A share is too small by at most 3 eps / 2, and each of two sums by eps / 2.
            least = largest * (1 - 4 * limits.eps) if rank == 1 or name != "reduce" else 0.0
            if not (parts.isfinite().all() and (parts.double().abs() >= least).all()):
                wrong.append((dtype, count, name, parts[0].tolist()))
        mean = found["all_reduce"]
        (gradient,) = torch.autograd.grad(mean, x, torch.ones_like(mean))
        if not ((gradient.abs().double() - 1).abs() <= 4 * limits.eps).all():
            wrong.append((dtype, count, "gradient", gradient[0].item()))
    for value in (float("inf"), -float("inf"), float("nan")):
        mean = dac.all_reduce(torch.tensor([value, 1.0]), "avg")
        if not torch.equal(mean[0].nan_to_num(5.0), torch.tensor(value).nan_to_num(5.0)) or mean[1] != 1:
            wrong.append(mean)
    return wrong


def test_the_mean_of_numbers_near_the_largest_is_finite_on_three_ranks():
    assert run_ranks(_largest_means, 3) == [[], [], []]


def _dtypes(rank):
    wrong = []
    for dtype in (torch.bool, torch.int8, torch.int16, torch.uint8, torch.int64):
        for count in (3, 100_001):
            x = torch.full((count,), 1 - rank if dtype is torch.bool else 3 + rank, dtype=dtype)
            total = 1 if dtype is torch.bool else 7
            for name, result, right in (
                ("all_reduce", dac.all_reduce(x), total),
                ("reduce", dac.reduce(x, 0), 0 if rank else total),
            ):
                # Compared as bytes, too: a bool stored as 2 is not a valid bool.
                expected = torch.full((count,), right, dtype=dtype)
                if not torch.equal(result.view(torch.uint8), expected.view(torch.uint8)):
                    wrong.append((dtype, count, name))
            if not torch.equal(dac.broadcast(x, 1), torch.full_like(x, 0 if dtype is torch.bool else 4)):
                wrong.append((dtype, count, "broadcast"))
            if not torch.equal(dac.all_gather_cat(x)[count:], dac.broadcast(x, 1)):
                wrong.append((dtype, count, "all_gather_cat"))
    floats = torch.full((3,), 0.5).to(torch.float8_e5m2)
    if dac.broadcast(floats, 0).float().tolist() != [0.5] * 3:
        wrong.append("float8")
    return wrong


def test_every_dtype_is_summed_and_moved():
    assert run_ranks(_dtypes, 2) == [[], []]


def _factors(rank):
    """The factor of a PREMUL_SUM changes neither dtype nor shape."""
    found = []
    for factor in (2.0, torch.tensor([2.0], dtype=torch.float64)):
        op = dist._make_nccl_premul_sum(factor)
        for x in (torch.tensor(3.0), torch.ones(2)):
            result = dac.all_reduce(x, op)
            found.append((result.dtype, tuple(result.shape), result.flatten()[0].item()))
    return found


def test_factors_keep_dtype_and_shape():
    expected = [(torch.float32, (), 12.0), (torch.float32, (2,), 4.0)] * 2
    assert run_ranks(_factors, 2) == [expected] * 2


def _changed_in_place(rank):
    """The result of every function can be changed in place."""
    failed = []
    calls = {
        "all_gather_cat": lambda x: [dac.all_gather_cat(x)],
        "all_gather_stack": lambda x: [dac.all_gather_stack(x, 1)],
        "all_gather": dac.all_gather,
        "gather": lambda x: dac.gather(x, 0),
        "all_reduce": lambda x: [dac.all_reduce(x)],
        "all_reduce max": lambda x: [dac.all_reduce(x, "max")],
        "all_reduce_coalesced": lambda x: dac.all_reduce_coalesced([x, 2 * x]),
        "all_gather_cat_coalesced": lambda x: dac.all_gather_cat_coalesced([x, 2 * x]),
        "reduce_scatter_dim": lambda x: [dac.reduce_scatter_dim(x)],
        "permute": lambda x: [dac.permute(x, [(0, 1), (1, 0)])],
    }
    for name, call in calls.items():
        try:
            for result in call(torch.ones(2, requires_grad=True)):
                result.add_(1)
        except RuntimeError as error:
            failed.append((name, str(error)))
    return failed


def test_results_can_be_changed_in_place():
    assert run_ranks(_changed_in_place, 2) == [[], []]


RARE = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.int16, torch.bool]
MOVED = {
    "broadcast": lambda x: dac.broadcast(x, 0),
    "gather": lambda x: torch.stack(dac.gather(x, 0)),
    "scatter": lambda x: dac.scatter([x, x], 1),
    "all_gather": lambda x: torch.stack(dac.all_gather(x)),
    "all_gather_cat": dac.all_gather_cat,
    "all_to_all_single": lambda x: dac.all_to_all_single(torch.empty_like(x), x),
    "all_to_all_dim": lambda x: dac.all_to_all_dim(x, 0, 0),
    "permute": lambda x: dac.permute(x, [(0, 1)]),
}
REDUCED = {
    "all_reduce": dac.all_reduce,
    "reduce": lambda x: dac.reduce(x, 0),
    "reduce_scatter_dim": dac.reduce_scatter_dim,
    "max": lambda x: dac.all_reduce(x, "max"),
    "product": lambda x: dac.all_reduce(x, "product"),
    "coalesced": lambda x: dac.all_reduce_coalesced([x, x])[1],
}


COMPILED = ("broadcast", "gather", "all_gather_cat", "all_to_all_dim", "all_reduce", "reduce", "max")


def _rare_dtypes(rank):
    """Small whole numbers, which every dtype represents: the same results as with float64."""
    wrong = []
    plain = torch.tensor([1.0, 2, 0, 3]) if rank else torch.tensor([2.0, 1, 1, 0])
    for dtype in RARE:
        x = plain.bool() if dtype is torch.bool else plain.to(dtype)
        for name, call in (MOVED | REDUCED).items():
            right = call(x.double() if dtype is not torch.bool else x.to(torch.uint8))
            right = right.bool() if dtype is torch.bool else right.to(dtype)
            ways = [call]
            if dtype in (torch.float8_e5m2, torch.int16) and name in COMPILED:
                torch._dynamo.reset()
                ways.append(torch.compile(call, backend="aot_eager", fullgraph=True))
            results = [way(x).view(torch.uint8) for way in ways]
            if not all(torch.equal(result, right.view(torch.uint8)) for result in results):
                wrong.append((dtype, name))
    uneven = torch.ones(2 + rank).to(torch.float8_e5m2)
    if dac.all_gather_cat(uneven, sizes=[2, 3]).float().tolist() != [1.0] * 5:
        wrong.append("uneven float8")
    leaf = torch.ones(2).to(torch.float8_e5m2).requires_grad_()
    dac.broadcast(leaf, 0).float().sum().backward()
    if leaf.grad.float().tolist() != [0.0 if rank else 2.0] * 2:
        wrong.append("gradient of float8")
    return wrong


def test_rare_dtypes_are_moved_and_reduced_on_every_rank():
    assert run_ranks(_rare_dtypes, 2, timeout=170, group_timeout=20) == [[], []]


def _bad_factors(rank):
    refused = []
    for factor, dtype in ((0.5, torch.int64), (2.5, torch.uint8), (torch.tensor(1j), torch.float32)):
        try:
            dac.all_reduce(torch.ones(2, dtype=dtype), dist._make_nccl_premul_sum(factor))
        except TypeError as error:
            refused.append("cannot have the factor" in str(error))
    whole = dac.all_reduce(torch.ones(2, dtype=torch.int64), dist._make_nccl_premul_sum(2.0))
    exact = dac.all_reduce(torch.ones(1, dtype=torch.float64), dist._make_nccl_premul_sum(0.1))
    return refused, whole.tolist(), exact.item()


def test_a_factor_is_not_rounded():
    assert run_ranks(_bad_factors, 2) == [([True] * 3, [4, 4], 0.2)] * 2


def _large_unsigned(rank):
    x = torch.tensor([2**63 + 5, 3, 2**64 - 1] if rank else [3, 2**63 + 5, 0], dtype=torch.uint64)
    return dac.all_reduce(x, "max").tolist(), dac.reduce_scatter_dim(x.repeat(2), "min").tolist()


def test_unsigned_numbers_of_64_bits_are_in_order():
    large = [2**63 + 5, 2**63 + 5, 2**64 - 1]
    assert run_ranks(_large_unsigned, 2, group_timeout=30) == [(large, [3, 3, 0])] * 2


def _unsigned_mean(rank):
    with pytest.raises(TypeError, match=r"AVG has no meaning for torch\.uint64"):
        dac.all_reduce(torch.tensor([2**63 + 4, 6], dtype=torch.uint64), "avg")
    return dac.all_reduce(torch.tensor([2**31 + 4, 6], dtype=torch.uint32), "avg").tolist()


def test_a_mean_that_torch_cannot_divide_is_refused():
    assert run_ranks(_unsigned_mean, 2, group_timeout=30) == [[2**31 + 4, 6]] * 2


def _negative_views(rank):
    """Views whose sign flip is pending, such as the imaginary part of a conjugate."""
    wrong = []
    for length in (1, 100, 40_000):
        x = torch._neg_view(torch.full((length,), 1.0 + rank))
        for name, call, value in (
            ("all_reduce", dac.all_reduce, -3.0),
            ("broadcast", lambda x: dac.broadcast(x, 1), -2.0),
            ("all_gather_cat", lambda x: dac.all_gather_cat(x).chunk(2)[1], -2.0),
            ("permute", lambda x: dac.permute(x, [(0, 1), (1, 0)]), rank - 2.0),
        ):
            if not torch.equal(call(x), torch.full((length,), value)):
                wrong.append((name, length))
    return wrong


def test_what_is_sent_has_its_sign():
    assert run_ranks(_negative_views, 2, group_timeout=30) == [[], []]


def _freed(rank):
    seen = []
    for call in (dac.all_reduce, lambda x: dac.all_reduce(x, "avg"), lambda x: dac.scatter([x, x], 0)):
        for length in (8, 80_000):
            x = torch.ones(length)
            free_storage(x)
            with pytest.raises(ValueError, match="storage was freed"):
                call(x)
            seen.append(length)
    return seen


def test_a_tensor_without_memory_is_refused():
    assert run_ranks(_freed, 2, group_timeout=30) == [[8, 80_000] * 3] * 2
