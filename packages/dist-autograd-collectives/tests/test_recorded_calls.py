"""Calls that something records as a graph: the graph communicates, and what follows works."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

CALLS = {
    "all_reduce": dac.all_reduce,
    "mean": lambda x: dac.all_reduce(x, "avg"),
    "all_gather": lambda x: torch.cat(dac.all_gather(x)),
    "broadcast": lambda x: dac.broadcast(x, 1),
    "reduce": lambda x: dac.reduce(x, 0),
    "gather": lambda x: torch.stack(dac.gather(x, 1)),
    "scatter": lambda x: dac.scatter([x, 2 * x], 0),
    "reduce_scatter_dim": dac.reduce_scatter_dim,
    "permute": lambda x: dac.permute(x, [(0, 1), (1, 0)]),
    "all_to_all_dim": lambda x: dac.all_to_all_dim(x, 0, 0),
    "started": lambda x: dac.start(dac.all_reduce, x).wait(),
}


def _of_one(call):
    """A function of one argument: make_fx counts those of a signature."""

    def of_one(x):
        return call(x)

    return of_one


def _recorded(rank):
    """Each linear, so its linearization is the collective itself, at every tangent."""
    wrong = []
    tangent = torch.arange(4.0) * (rank + 1)
    for name, call in CALLS.items():
        right = call(tangent)
        _, linear = torch.func.linearize(call, torch.ones(4))
        graph = make_fx(_of_one(call))(torch.ones(4))
        symbolic = make_fx(_of_one(call), tracing_mode="symbolic")(torch.ones(4))
        functional = torch.func.functionalize(call)
        ways = {"linearize": linear, "make_fx": graph, "symbolic": symbolic, "functionalize": functional}
        for way, function in ways.items():
            found = [function(tangent) for _ in range(2)]  # garbage may be right once
            if not all(torch.equal(one, right) for one in found):
                wrong.append((name, way))
        gradients = make_fx(_of_one(torch.func.grad(lambda x, of=call: (of(x) ** 2).sum())))(torch.ones(4))
        leaf = tangent.clone().requires_grad_()
        (expected,) = torch.autograd.grad((call(leaf) ** 2).sum(), leaf)
        if not torch.equal(gradients(tangent), expected):
            wrong.append((name, "gradient"))
    return wrong, dac.all_reduce(torch.ones(2)).tolist()


def test_a_recorded_graph_communicates_and_so_does_the_next_call():
    assert run_ranks(_recorded, 2, timeout=120, group_timeout=20) == [([], [2, 2])] * 2


BENT = {
    "all_reduce": lambda x: dac.all_reduce(x) * x,
    "largest": lambda x: dac.all_reduce(x, "max") * x,
    "product": lambda x: dac.reduce_scatter_dim(x, "product"),
    "broadcast": lambda x: dac.broadcast(x, 1) * x,
    "two": lambda x: dac.all_gather_cat(dac.all_reduce(x).sin()),
}


def _linearized(rank):
    """Nonlinear ones, of which linearize computes a part beforehand: it must have arrived by then."""
    wrong = []
    tangent = torch.arange(50_000.0).sin() + rank
    for name, call in BENT.items():
        x = torch.arange(50_000.0).cos() + rank
        right = torch.func.jvp(call, (x,), (tangent,))[1]
        _, linear = torch.func.linearize(call, x)
        wrong += [name for _ in range(3) if not torch.equal(linear(tangent), right)]
    return wrong


@pytest.mark.parametrize("size", [2, 4])
def test_linearize_computes_the_constant_part_whole(size):
    assert run_ranks(_linearized, size, timeout=120, group_timeout=20) == [[]] * size


def _refused(rank):
    """What needs shapes that only another rank knows has no graph; nothing is sent."""
    source = 1 - rank
    for call, text in (
        (lambda x: dac.scatter(None, source), "every rank needs a list of tensors, or like="),
        (lambda x: dac.all_gather_cat(x, sizes="auto"), "'auto' cannot be traced"),
        (lambda x: dac.all_reduce(x, anchor=True), "anchor=True works neither"),
    ):
        with pytest.raises(ValueError, match=text):
            make_fx(call)(torch.ones(2))
    return dac.all_reduce(torch.ones(1)).item()


def test_what_cannot_be_recorded_is_refused():
    assert run_ranks(_refused, 2, group_timeout=20) == [2, 2]
