"""Collectives that meet a wrong one, or leftovers of an earlier one: an error, never wrong values."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils.testing import patience, run_ranks


def _outcome(fn, *args, **kwargs):
    try:
        return fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__, str(error)


def _dtypes(rank, group):
    return dac.all_reduce(torch.ones(4, dtype=torch.int32 if rank else torch.float32), group=group)


def _operations(rank, group):
    return dac.all_reduce(torch.ones(4), "min" if rank else "max", group)


def _shapes(rank, group):
    return dac.all_reduce(torch.ones((2, 3) if rank else (3, 2)), group=group)


def _functions(rank, group):
    x = torch.ones(4)
    return dac.all_gather_cat(x, group=group) if rank else dac.all_gather(x, group)


def _backwards(rank, group):
    """Each rank uses a different one of two results."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    first, second = dac.all_reduce(x, group=group), dac.all_reduce(y, group=group)
    (second if rank else 10 * first).sum().backward()
    return x.grad, y.grad


def _second_steps(rank, group):
    """A maximum takes two collectives; the second one runs in wait."""
    handles = [dac.start(dac.all_reduce, torch.full((4,), float(i)), "max", group) for i in range(2)]
    return [handle.wait() for handle in (reversed(handles) if rank else handles)]


def _copies(rank, group):
    """Only their backward communicates, and each rank starts with a different one."""
    x, y = (torch.ones(3, requires_grad=True) for _ in range(2))
    first, second = dac.copy_to_group(x, group=group).sum(), 10 * dac.copy_to_group(y, group=group).sum()
    for loss in (second, first) if rank else (first, second):
        loss.backward()
    return x.grad, y.grad


def _orders(rank, group):
    """One rank runs the backward of a backward where the other runs the first backward."""
    x = torch.full((3,), 2.0, requires_grad=True)
    loss = (dac.all_reduce(x, group=group) ** 3).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    losses = (loss, gradient.sum()) if rank else (gradient.sum(), loss)
    return [torch.autograd.grad(one, x, retain_graph=True) for one in losses]


CROSSED = [_dtypes, _operations, _shapes, _functions, _backwards, _second_steps, _copies, _orders]


def _copies_of_one_rank(rank):
    """A copy without a gradient is local."""
    if rank == 0:
        with torch.no_grad():
            dac.copy_to_group(torch.ones(3, requires_grad=True))
        dac.copy_to_group(torch.ones(3))
    x = torch.ones(3, requires_grad=True)
    dac.copy_to_group(x).sum().backward()
    return x.grad.tolist()


def test_a_rank_may_copy_alone_where_no_gradient_comes_back():
    assert run_ranks(_copies_of_one_rank, 2, timeout=30, group_timeout=10) == [[2.0] * 3] * 2


def _crossed(rank, limit):
    seen = {}
    # One group per case: after a failure a group cannot be used again.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in CROSSED]
    for call, group in zip(CROSSED, groups, strict=True):
        dist.barrier()
        seen[call.__name__] = _outcome(call, rank, group)
    return seen


def test_calls_that_are_not_the_same_never_take_each_other_s_values():
    for seen in run_ranks(_crossed, 2, patience(1.0)):
        for name, outcome in seen.items():
            assert outcome[0] == "CollectiveError", (name, outcome)


class _FailsOnce(torch.autograd.Function):
    fails = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        if _FailsOnce.fails:
            _FailsOnce.fails = False
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


def _short_broadcast(rank):
    outcome = _outcome(dac.broadcast, torch.full((30_000 if rank == 0 else 40_000,), float(rank)), 0)
    time.sleep(0.5)  # until the others have raised or returned: an exit before would be their error
    return outcome


def test_a_short_broadcast_is_an_error_also_where_another_receiver_passes_it_on():
    source, *others = run_ranks(_short_broadcast, 4)
    assert torch.equal(source, torch.zeros(30_000))
    for outcome in others:
        assert outcome[0] == "CollectiveError"
        assert "sent less than the 160000 bytes" in outcome[1]
