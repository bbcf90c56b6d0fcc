"""Calls find each other on all ranks, whatever a rank copies alone and whether gradients are on there."""

import pytest
import torch

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks


def _copies_alone(rank):
    """One rank copies, once so that its result has a gradient, and never runs that backward."""
    x = torch.ones(3, requires_grad=True)
    if rank == 0:
        dac.copy_to_group(x)
        with torch.no_grad():
            dac.copy_to_group(x)
    total = dac.all_reduce(torch.ones(2)).tolist()
    if rank == 0:
        dac.copy_to_group(x)
    dac.copy_to_group(x).sum().backward()
    return total, x.grad.tolist(), dac.all_gather_cat(torch.ones(1)).tolist()


def test_a_rank_may_copy_alone():
    assert run_ranks(_copies_alone, 2, group_timeout=10) == [([2, 2], [2, 2, 2], [1, 1])] * 2


def _without_gradients(rank):
    """One rank evaluates while the others train; each function counts the same on both."""
    x = torch.ones(4, requires_grad=True)
    calls = [
        dac.copy_to_group,
        lambda x: dac.all_reduce(x, grad="replicated"),
        lambda x: dac.all_reduce(x, "max"),
        lambda x: dac.all_gather(x)[0],
        lambda x: dac.broadcast(x, 0, grad="replicated"),
        dac.reduce_scatter_dim,
        lambda x: dac.start(dac.copy_to_group, x).wait(),
    ]
    for call in calls:
        with torch.set_grad_enabled(rank == 0):
            call(x)
        (dac.copy_to_group(x) * 2).sum().backward()
    return x.grad.tolist()


def test_a_call_counts_the_same_with_gradients_and_without():
    assert run_ranks(_without_gradients, 2, group_timeout=10) == [[28.0] * 4] * 2


def _of_several_orders(rank):
    """The newest copy is found first, also through a second backward."""
    x = torch.full((2,), 3.0, requires_grad=True)
    if rank:
        dac.copy_to_group(x)
    loss = (dac.copy_to_group(x) ** 3).sum() + (dac.copy_to_group(x) ** 2).sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.tolist(), second.tolist()


def test_copies_are_told_apart_in_backward_of_any_order():
    # Two ranks: 2 (3 x^2 + 2 x), and its derivative; an all-reduce whose loss is one counts that once.
    assert run_ranks(_of_several_orders, 2, group_timeout=10) == [([66.0] * 2, [40.0] * 2)] * 2


@pytest.mark.parametrize("size", [2, 3])
def test_started_calls_count_where_they_start(size):
    assert run_ranks(_waited_in_any_order, size, group_timeout=10) == [[float(size), 2.0 * size]] * size


def _waited_in_any_order(rank):
    first, second = (dac.start(dac.all_reduce, torch.full((1,), float(k))) for k in (1, 2))
    results = {}
    for name, handle in (("second", second), ("first", first))[:: 1 if rank else -1]:
        results[name] = handle.wait().item()
    return [results["first"], results["second"]]
