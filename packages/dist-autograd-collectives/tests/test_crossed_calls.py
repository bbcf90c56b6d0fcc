"""Calls that differ between ranks, without a comparison: an error at the timeout, never wrong values."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import dist_autograd_collectives as dac
from dist_utils.testing import patience, run_ranks


def _leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def _length(rank):
    return torch.full((2 if rank else 4,), 1.0 + rank)


def _shapes(rank):
    """As many elements in another shape, which differs in ones."""
    return torch.ones((2, 3) if rank else (2, 1, 3))


def _integers(rank):
    """Means of both are made of sums in 64 bits."""
    return torch.ones(4, dtype=torch.int64 if rank else torch.int32)


def _results_used(rank, group):
    """Each rank uses a different one of two results."""
    first, second = dac.all_reduce(_leaf(3), group=group), dac.all_reduce(_leaf(3), group=group)
    (second if rank else 10 * first).sum().backward()


def _second_steps(rank, group):
    """A maximum takes two collectives; the second one runs in wait."""
    handles = [dac.start(dac.all_reduce, torch.full((4,), float(i)), "max", group) for i in range(2)]
    for handle in reversed(handles) if rank else handles:
        handle.wait()


def _copies(rank, group):
    """Only their backward communicates, and each rank starts with a different one."""
    first = dac.copy_to_group(_leaf(3), group=group).sum()
    second = 10 * dac.copy_to_group(_leaf(3), group=group).sum()
    for loss in (second, first) if rank else (first, second):
        loss.backward()


def _orders(rank, group):
    """One rank runs the backward of a backward where the other runs the first backward."""
    x = _leaf(3)
    loss = (dac.all_reduce(x, group=group) ** 3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    for one in (loss, gradient.sum()) if rank else (gradient.sum(), loss):
        torch.autograd.grad(one, x, retain_graph=True)


def _tangents(rank, group):
    """One rank's loss is without the tangent, whose backward the other one runs first."""
    x = _leaf(3)
    with forward_ad.dual_level():
        dual = dac.all_reduce(forward_ad.make_dual(x, x.cos()), group=group)
        value, tangent = forward_ad.unpack_dual(dual)
        (value.sum() if rank else value.sum() + 10 * tangent.sum()).backward()
    assert x.grad.tolist() == [2, 2, 2]  # on the rank that does not wait, if there is one


CROSSED = {
    "lengths, all_reduce": lambda r, g: dac.all_reduce(_length(r), group=g),
    "lengths, large sum": lambda r, g: dac.all_reduce(torch.ones(50_000 + r), group=g),
    "lengths, broadcast": lambda r, g: dac.broadcast(_length(r), 1, g),
    "lengths, gather": lambda r, g: dac.gather(_length(r), 0, g),
    "lengths, scatter": lambda r, g: dac.scatter([_length(r)] * 2, 1, g, like=_length(r)),
    "lengths, all_to_all_dim": lambda r, g: dac.all_to_all_dim(_length(r), 0, 0, group=g),
    "lengths, reduce_scatter_dim": lambda r, g: dac.reduce_scatter_dim(_length(r), group=g),
    "ones, all_reduce": lambda r, g: dac.all_reduce(_shapes(r), group=g),
    "order of dimensions": lambda r, g: dac.broadcast(torch.ones((2, 3) if r else (3, 2)), 1, g),
    "dtypes": lambda r, g: dac.all_reduce(torch.ones(4, dtype=torch.int32 if r else None), group=g),
    "dtypes of means": lambda r, g: dac.all_reduce(_integers(r), "avg", g),
    "operations": lambda r, g: dac.all_reduce(torch.ones(4), "min" if r else "max", g),
    "functions": lambda r, g: (dac.all_gather_cat if r else dac.all_gather)(torch.ones(4), group=g),
    "sizes": lambda r, g: dac.reduce_scatter_dim(torch.ones(4), sizes=[3, 1] if r else [1, 3], group=g),
    "sizes, all_gather_cat": lambda r, g: dac.all_gather_cat(_length(r), sizes=[4, 3 - r], group=g),
    "dimensions": lambda r, g: dac.all_gather_stack(torch.ones(2, 2), r, group=g),
    "conventions": lambda r, g: dac.all_reduce(torch.ones(4), group=g, grad="replicated" if r else "sum"),
    "tangents": _tangents,
    "results used": _results_used,
    "second steps": _second_steps,
    "copies": _copies,
    "orders": _orders,
}


def _crossed(rank, limit):
    # One group per case: after a failure a group cannot be used again. All cases wait at the same time.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in CROSSED]
    dist.barrier()

    def outcome(call, group):
        try:
            call(rank, group)
        except Exception as error:  # noqa: BLE001 - whatever it is
            return type(error).__name__, str(error)
        return "no error", ""

    with ThreadPoolExecutor(len(CROSSED)) as pool:
        return dict(zip(CROSSED, pool.map(outcome, CROSSED.values(), groups), strict=True))


def test_calls_that_differ_never_take_each_others_values():
    first, second = run_ranks(_crossed, 2, patience(1.0), timeout=120)
    for name in CROSSED:
        outcomes = first[name], second[name]
        # A sender need not notice that nobody receives, but the rank that waits does.
        assert {kind for kind, _ in outcomes} in ({"CollectiveError"}, {"CollectiveError", "no error"}), (
            outcomes
        )
        assert "compare_calls() tells at once" in "".join(text for _, text in outcomes), name


def _short_broadcast(rank):
    x = torch.full((30_000 if rank == 0 else 40_000,), float(rank))
    if rank == 0:
        assert dac.broadcast(x, 0).unique().tolist() == [0]
    else:
        with pytest.raises(dac.CollectiveError, match="sent less than the 160000 bytes"):
            dac.broadcast(x, 0)
    dist.barrier()  # an exit before would be an error of the others


def test_a_short_broadcast_is_an_error_also_where_another_receiver_passes_it_on():
    run_ranks(_short_broadcast, 4)


CALLS = [
    dac.copy_to_group,
    lambda x: dac.all_reduce(x, grad="replicated"),
    lambda x: dac.all_reduce(x, "max"),
    lambda x: dac.broadcast(x, 0, grad="replicated"),
    lambda x: dac.start(dac.copy_to_group, x).wait(),
]


def _steps_of_one_rank(rank):
    """One rank evaluates while the other trains: calls still find each other, in a second backward, too."""
    x = _leaf(4)
    for call in CALLS:
        with torch.set_grad_enabled(rank == 0):
            call(x)
        (dac.copy_to_group(x) * 2).sum().backward()
    y = torch.full((2,), 3.0, requires_grad=True)
    loss = (dac.copy_to_group(y) ** 3).sum() + (dac.copy_to_group(y) ** 2).sum()
    (first,) = torch.autograd.grad(loss, y, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), y)
    return x.grad.tolist(), first.tolist(), second.tolist(), dac.all_gather_cat(torch.ones(1)).tolist()


def test_calls_count_the_same_on_ranks_that_evaluate():
    # Two ranks: 2 (3 y^2 + 2 y), and its derivative; an all-reduce whose loss is one counts that once.
    assert (
        run_ranks(_steps_of_one_rank, 2, group_timeout=10)
        == [([20.0] * 4, [66.0] * 2, [40.0] * 2, [1, 1])] * 2
    )


class _FailsOnce(torch.autograd.Function):
    failures = itertools.count()

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        if next(_FailsOnce.failures) == 0:
            raise ValueError("the user's own")
        return cotangent


def _backward_after_one_that_failed(rank):
    x = torch.ones(3, requires_grad=True)
    handle = dac.start(dac.all_reduce, x)
    between = _FailsOnce.apply(x)  # its backward runs between the two halves of the collective's
    loss = (2 * handle.wait()).sum() + between.sum()
    with pytest.raises(ValueError, match="own"):
        loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    return x.grad.tolist()


@pytest.mark.parametrize("size", [2, 3])
def test_a_backward_that_failed_leaves_nothing_to_the_next_one(size):
    # Each rank's loss uses the sum twice, and x itself once.
    assert run_ranks(_backward_after_one_that_failed, size) == [[2.0 * size + 1] * 3] * size
