"""Collectives that are started early and waited for late, forward and backward."""

import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import dist_autograd_collectives as dac
from dist_autograd_collectives import eager
from dist_utils.testing import run_ranks


class _Compute(torch.autograd.Function):
    """Writes down when it runs."""

    @staticmethod
    def forward(ctx, x, events):
        ctx.events = events
        events.append("compute")
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        ctx.events.append("compute's backward")
        return cotangent, None


def _order(rank):
    events = []
    begin = eager.begin

    def noted(tensors, call):
        events.append(f"launch {call.kind}")
        wait = begin(tensors, call)

        def noted_wait():
            events.append(f"wait {call.kind}")
            return wait()

        return noted_wait

    eager.begin = noted
    x = torch.full((3,), 1.0 + rank, requires_grad=True)
    z = torch.full((3,), 2.0, requires_grad=True)
    handle = dac.start(dac.all_gather_stack, x)
    computed = _Compute.apply(z, events)
    gathered = handle.wait()
    (gathered.sum(0) * computed).sum().backward()
    return events, x.grad.tolist(), z.grad.tolist()


def test_communication_surrounds_what_is_computed_meanwhile():
    for events, x_grad, z_grad in run_ranks(_order, 2):
        assert events == [
            "launch all_gather",
            "compute",
            "wait all_gather",
            "launch reduce_scatter",
            "compute's backward",
            "wait reduce_scatter",
        ]
        assert x_grad == [4, 4, 4]
        assert z_grad == [3, 3, 3]


def _twice(rank):
    """Second order, a graph that is kept, several under way at once, one that nobody waits for."""
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    handles = [dac.start(dac.all_reduce, k * x) for k in (1, 2)]
    first, second = handles[1].wait(), handles[0].wait()  # in any order
    value = (first**3 + second).sum()
    (gradient,) = torch.autograd.grad(value, x, create_graph=True)
    (hessian_row,) = torch.autograd.grad(gradient.sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(value, x)
    dac.start(dac.all_reduce, x)
    after = dac.all_reduce(x.detach())
    return gradient.tolist(), hessian_row.tolist(), torch.equal(again, gradient), after.tolist()


def test_started_collectives_have_every_gradient():
    xs = [torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True) for rank in range(2)]
    total = sum(xs)
    value = 2 * ((2 * total) ** 3 + total).sum()  # both ranks have this loss
    first = torch.autograd.grad(value, xs, create_graph=True)
    second = torch.autograd.grad(sum(gradient.sum() for gradient in first), xs)
    for rank, (gradient, row, same, after) in enumerate(run_ranks(_twice, 2)):
        assert gradient == pytest.approx(first[rank].tolist(), rel=1e-12)
        assert row == pytest.approx(second[rank].tolist(), rel=1e-12)
        assert same
        assert after == [3, 4]


def _overlaps(rank):
    """The other rank comes late; this one computes meanwhile and waits for the rest only."""
    x = torch.ones(4)
    dac.all_reduce(x)  # connects
    dist.barrier()
    began = time.monotonic()
    if rank:
        time.sleep(0.5)
    handle = dac.start(dac.all_reduce, x)
    launched = time.monotonic() - began
    handle.wait()
    return launched, time.monotonic() - began


def test_starting_does_not_wait_for_other_ranks():
    (launched, done), _ = run_ranks(_overlaps, 2)
    assert launched < 0.25
    assert done > 0.25


def _checkpointed(rank):
    """The second forward of a checkpoint stops where nothing more is needed: between start and wait."""

    def block(x):
        handle = dac.start(dac.all_gather_stack, 2 * x)
        early = x.sin()
        return early.sum() + handle.wait().sum()

    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64, requires_grad=True)
    found = []
    for reentrant in (False, True):
        x.grad = None
        checkpoint(block, x, use_reentrant=reentrant).backward()
        found.append(x.grad.tolist())
    right = 4 + x.detach().cos()
    return found, right.tolist(), dac.all_reduce(torch.ones(1)).tolist()


def test_a_checkpoint_may_drop_what_it_started():
    for found, right, after in run_ranks(_checkpointed, 2, timeout=30):
        assert found == [pytest.approx(right, rel=1e-12)] * 2
        assert after == [2]


def _transformed(rank):
    x = torch.tensor([1.0 + rank, 2.0], dtype=torch.float64)

    def total(x):
        return (dac.start(dac.all_gather_stack, x).wait() ** 2).sum()

    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(total(leaf), leaf)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    (traced,) = torch.autograd.grad(compiled(leaf), leaf)
    return torch.equal(torch.func.grad(total)(x), right), torch.equal(traced, right)


def test_started_collectives_can_be_transformed_and_compiled():
    assert run_ranks(_transformed, 2) == [(True, True)] * 2


def test_only_collectives_can_be_started():
    with pytest.raises(TypeError, match="start takes a collective of this package"):
        dac.start(torch.add, 1, 2)
