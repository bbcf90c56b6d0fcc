"""Ranks that never reach a collective: the others' errors, and how to avoid them.

A rank that dies or hangs between a collective and its backward is in integration_tests/test_peers.py.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils.testing import patience, run_ranks

# In each, rank 0 waits for rank 1 in backward. With the gradient on rank 0 where both ranks take part and
# their losses count once and twice.
CALLS = {
    "all_reduce(SUM)": (dac.all_reduce, [3, 3]),
    "all_reduce(MAX)": (lambda x: dac.all_reduce(x, "max"), [1.5, 1.5]),
    "broadcast": (lambda x: dac.broadcast(x, 0), [3, 3]),
    "reduce(SUM)": (lambda x: dac.reduce(x, 1), [2, 2]),
    "all_gather": (lambda x: dac.all_gather(x)[0], [3, 3]),
    "all_gather_base": (lambda x: dac.all_gather_base(torch.empty(4), x), [3, 3]),
    "gather": (lambda x: dac.gather(x, 1)[0], [2, 2]),
    "scatter": (lambda x: dac.scatter([x, x], 0), [3, 3]),
    "reduce_scatter(SUM)": (
        lambda x: dac.reduce_scatter(torch.empty(2), [x, x]),
        [3, 3],
    ),
    "all_to_all": (lambda x: dac.all_to_all([torch.empty(2)] * 2, [x, x])[0], [3, 3]),
    "all_to_all_single": (
        lambda x: dac.all_to_all_single(torch.empty(2), x),
        [1, 2],
    ),
    "all_gather_cat": (dac.all_gather_cat, [3, 3]),
    "reduce_scatter_dim(SUM)": (dac.reduce_scatter_dim, [1, 2]),
    "permute": (lambda x: dac.permute(x, [(0, 1), (1, 0)]), [2, 2]),
    "copy_to_group": (dac.copy_to_group, [3, 3]),
}


def _anchored(rank):
    """Only rank 0 needs a gradient."""
    seen = {}
    for title, (call, _) in CALLS.items():
        x = torch.ones(2, requires_grad=rank == 0)
        (call(dac.anchored(x)).sum() * (1 + rank)).backward()
        seen[title] = None if x.grad is None else x.grad.tolist()
    return seen


def test_anchored_lets_ranks_without_a_gradient_take_part():
    gradients = {title: gradient for title, (_, gradient) in CALLS.items()}
    assert run_ranks(_anchored, 2, group_timeout=30) == [gradients, dict.fromkeys(CALLS)]


def _connected(rank):
    """Rank 1 does not use its output, which it connects."""
    seen = {}
    for title, (call, _) in CALLS.items():
        x = torch.ones(2, requires_grad=True)
        y = call(x)
        dac.connect(y.sum() if rank == 0 else (x * 3).sum(), y, [y]).backward()
        seen[title] = x.grad.tolist()
    return seen


def test_connect_lets_ranks_take_part_that_do_not_use_the_output():
    first, second = run_ranks(_connected, 2, group_timeout=30)
    for title, gradients in {
        "all_reduce(SUM)": ([1, 1], [4, 4]),
        "broadcast": ([1, 1], [3, 3]),
        "permute": ([0, 0], [4, 4]),
    }.items():
        assert (first[title], second[title]) == gradients, title


def test_connect_adds_nothing_from_what_it_connects():
    loss = torch.tensor(2.0, requires_grad=True)
    broken = torch.tensor([float("nan"), float("inf")], requires_grad=True)
    connected = dac.connect(loss, broken, broken + 0j)
    connected.backward()
    assert (connected.item(), loss.grad.item(), broken.grad.tolist()) == (2, 1, [0, 0])


TITLES = ["all_reduce(SUM)", "copy_to_group"]


def _unused(rank, limit):
    """Rank 1 does not use its output, nor connect it."""
    seen = {}
    # One group per case: after a failure a group cannot be used again.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in TITLES]
    for title, group in zip(TITLES, groups, strict=True):
        dist.barrier()
        x = torch.ones(2, requires_grad=True)
        y = getattr(dac, title.partition("(")[0])(x, group=group)
        try:
            (x if rank else y).sum().backward()
        except dac.CollectiveError as error:
            seen[title] = str(error)
    return seen


def test_an_unused_output_ends_in_an_error_with_the_name_of_the_function():
    first, second = run_ranks(_unused, 2, patience(0.5), timeout=100)
    assert second == {}
    assert list(first) == TITLES
    for title, text in first.items():
        assert f"the backward of {title} failed on rank 0 of 2 in its group" in text
        assert "see connect" in text


def _asks_for_some_gradients(rank, limit):
    """``torch.autograd.grad`` follows only what leads to its inputs, which an anchored tensor does not."""
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=rank == 0)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=limit))
    inputs = [w, x] if rank == 0 else [w]
    loss = (dac.broadcast(x if rank == 0 else dac.connect(x, w), 0) * w * (1 + rank)).sum()
    connected = [gradient.tolist() for gradient in torch.autograd.grad(loss, inputs)]
    loss = (dac.broadcast(dac.anchored(x), 0, group) * w).sum()
    if rank:
        torch.autograd.grad(loss, inputs)
        return connected, None
    with pytest.raises(dac.CollectiveError) as caught:
        torch.autograd.grad(loss, inputs)
    return connected, str(caught.value)


def test_a_tensor_connected_to_an_input_takes_part_where_an_anchored_one_cannot():
    (first, anchored), (second, _) = run_ranks(_asks_for_some_gradients, 2, patience(0.5), group_timeout=30)
    assert first == [[1, 1], [3, 3]]
    assert second == [[2, 2]]
    assert "backward(inputs=...) follow only what leads to their inputs" in anchored
    assert "there pass connect(tensor, input)" in anchored


def _destroyed(rank):
    group = dist.new_group([0, 1])
    y = dac.all_reduce(torch.ones(2, requires_grad=True), group=group)
    dist.destroy_process_group(group)
    text = rf"all_reduce\(SUM\) failed on rank {rank} of 2 in its group: it was destroyed"
    with pytest.raises(dac.CollectiveError, match=text):
        y.sum().backward()


def test_backward_after_the_group_is_gone_is_an_error():
    run_ranks(_destroyed, 2)
