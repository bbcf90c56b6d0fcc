"""Values that are easy to get wrong: near the ends of a range, and of dtypes that backends do not know."""

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

INF = float("inf")
# Both ranks' values, and the gradients of the sum of both ranks' losses.
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
        # float32 as written, and one product.
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
                # As bytes too: a bool of 2 is no bool.
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
    """Results can be changed in place, whatever the function."""
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
