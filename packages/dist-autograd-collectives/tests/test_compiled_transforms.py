"""Transforms of ``torch.func`` give the same results inside ``torch.compile`` as without it."""

import itertools

import pytest
import torch
from collective_cases import CASES, inputs
from torch.autograd import forward_ad

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

# Every kind of linear collective, and collectives composed of several.
COLLECTIVES = {
    "all_reduce": dac.all_reduce,
    "all_reduce max": lambda x: dac.all_reduce(x, "max"),
    "all_reduce product, replicated": lambda x: dac.all_reduce(x, "product", grad="replicated"),
    "reduce": lambda x: dac.reduce(x, 1),
    "reduce_scatter_dim min": lambda x: dac.reduce_scatter_dim(x, "min"),
    "reduce_scatter_dim, uneven": lambda x: dac.reduce_scatter_dim(x, "avg", sizes=[1, x.shape[0] - 1]),
    "broadcast": lambda x: dac.broadcast(x, 0),
    "gather": lambda x: torch.stack(dac.gather(x, 0)),
    "scatter": lambda x: dac.scatter([x, 2 * x], 1),
    "all_gather": lambda x: torch.stack(dac.all_gather(x)),
    "all_gather_cat": dac.all_gather_cat,
    "all_gather_cat, replicated": lambda x: dac.all_gather_cat(x, grad="replicated"),
    "all_to_all_dim": lambda x: dac.all_to_all_dim(x, 0, 0),
    "permute": lambda x: dac.permute(x, [(0, 1), (1, 0)]),
    "permute, one way": lambda x: dac.permute(x, [(0, 1)]),
    "coalesced": lambda x: sum(part.sum() for part in dac.all_gather_cat_coalesced([x, x.sin()])),
    "started": lambda x: dac.start(dac.all_gather_stack, x).wait(),
    "copy_to_group": dac.copy_to_group,
}


def _first(f):
    return torch.func.grad(lambda x: (f(x) ** 3).sum())


def _tangent(f):
    return lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1]


TRANSFORMS = {
    "grad": _first,
    "grad of grad": lambda f: _first(_first(f)),
    "vmap": lambda f: lambda x: torch.func.vmap(f, in_dims=1, out_dims=0)(torch.stack([x, x.sin()], 1)),
    "vmap of grad": lambda f: torch.func.vmap(_first(f)),
    "grad of vmap": lambda f: _first(torch.func.vmap(f)),
    "jvp": _tangent,
    "jvp of grad": lambda f: _tangent(_first(f)),
    "jacrev": torch.func.jacrev,
    "jacfwd": torch.func.jacfwd,
}


def _difference(f, x, backend, *, fullgraph=True):
    """Difference between compiled and eager results, over three runs, since garbage may be right once."""
    torch._dynamo.reset()
    right, compiled = f(x), torch.compile(f, backend=backend, fullgraph=fullgraph)
    return max((compiled(x) - right).abs().max().item() for _ in range(3))


def _transformed(rank, backend, pairs):
    wrong = {}
    for name, how in pairs:
        # Two dimensions of length 4: one to map over, and one that two ranks can share.
        x = inputs(rank, (4, 4), torch.float64, ties=False)
        if how in ("jacrev", "jacfwd"):
            x = x[0]
        error = _difference(TRANSFORMS[how](COLLECTIVES[name]), x, backend)
        # Products of about ten numbers up to 100.
        if not error < 1e-10:
            wrong[name, how] = error
    return wrong


def _goes(name, how):
    """Ranks whose results have different lengths have Jacobians, and so batches, of different lengths."""
    return not ("uneven" in name and how == "jacrev")


def test_every_transform_and_every_collective():
    pairs = list(zip(COLLECTIVES, itertools.cycle(TRANSFORMS), strict=False))
    assert all(itertools.starmap(_goes, pairs))
    assert {how for _, how in pairs} == set(TRANSFORMS)
    assert run_ranks(_transformed, 2, "aot_eager", pairs, timeout=600) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", TRANSFORMS)
def test_every_transform_of_every_collective(how):
    pairs = [(name, how) for name in COLLECTIVES if _goes(name, how)]
    assert run_ranks(_transformed, 2, "aot_eager", pairs, timeout=600) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_transforms_with_other_backends(backend):
    names, transforms = ["all_reduce", "all_gather_cat"], ["grad of grad", "vmap of grad", "jvp", "jacrev"]
    pairs = list(itertools.product(names, transforms))
    assert run_ranks(_transformed, 2, backend, pairs, timeout=600) == [{}, {}]


def _cubed(x):
    return dac.all_reduce(x) ** 3


def _dual(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_cubed(forward_ad.make_dual(x, x.cos()))).tangent


def _backward_of_a_transform(x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(torch.compile(_first(dac.all_reduce), backend="aot_eager")(leaf).sum(), leaf)


def _otherwise(rank):
    x = inputs(rank, (3, 2), torch.float64, ties=False)
    broken = lambda x: torch.func.vmap(_cubed)(torch._dynamo.graph_break() or x)  # noqa: E731
    (second,) = _backward_of_a_transform(x)
    leaf = x.clone().requires_grad_()
    (right,) = torch.autograd.grad(_first(dac.all_reduce)(leaf).sum(), leaf)
    mapped = torch.func.vmap(torch.compile(_cubed, backend="eager"))(x)
    return {
        "forward mode without torch.func": _difference(_dual, x, "aot_eager"),
        "three levels": _difference(torch.func.hessian(lambda x: _cubed(x).sum()), x, "aot_eager"),
        "a break in the graph": _difference(broken, x, "aot_eager", fullgraph=False),
        "vmap of what is compiled": (mapped - torch.func.vmap(_cubed)(x)).abs().max().item(),
        "backward through a compiled transform": (second - right).abs().max().item(),
        "not batched": _difference(
            lambda x: torch.func.vmap(lambda y: y * _cubed(x).sum())(x), x, "aot_eager"
        ),
    }


def test_transforms_around_and_beside_a_graph():
    for found in run_ranks(_otherwise, 2, timeout=120):
        assert max(found.values()) < 1e-10, found


def _three(rank):
    case = CASES["all_gather_cat, uneven"]
    x = inputs(rank, (4, 3), torch.float64, ties=False)
    total = lambda x: case.call(x, None, [0, 1, 2])[0]  # noqa: E731
    return max(
        _difference(transform(total), x, "aot_eager") for transform in (_first, torch.func.vmap, _tangent)
    )


def test_uneven_parts_of_three_ranks():
    assert max(run_ranks(_three, 3, timeout=120)) < 1e-10
