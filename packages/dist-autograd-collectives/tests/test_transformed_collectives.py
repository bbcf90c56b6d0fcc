"""Collectives under ``torch.func``, ``torch.compile`` and in recorded graphs: as in plain autograd."""

import shutil
from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

SWAP = [(0, 1), (1, 0)]
# Every kind of linear collective, and collectives composed of several.
COLLECTIVES = {
    "all_reduce": dac.all_reduce,
    "all_reduce max": lambda x: dac.all_reduce(x, "max") * x,
    "all_reduce product, replicated": lambda x: dac.all_reduce(x, "product", grad="replicated"),
    "reduce": lambda x: dac.reduce(x, 1),
    "reduce_scatter_dim min": lambda x: dac.reduce_scatter_dim(x, "min"),
    "reduce_scatter_dim, uneven": lambda x: dac.reduce_scatter_dim(x, "avg", sizes=[1, x.shape[0] - 1]),
    "broadcast": lambda x: dac.broadcast(x, 1) * x,
    "gather": lambda x: torch.stack(dac.gather(x, 0)),
    "scatter": lambda x: dac.scatter([x, 2 * x], 1),
    "all_gather": lambda x: torch.cat(dac.all_gather(x)),
    "all_gather_cat": lambda x: dac.all_gather_cat(dac.all_reduce(x).sin()),
    "all_gather_cat, replicated": lambda x: dac.all_gather_cat(x, grad="replicated"),
    "all_to_all_dim": lambda x: dac.all_to_all_dim(x, 0, 0),
    "permute": lambda x: dac.permute(x, SWAP),
    "permute, one way": lambda x: dac.permute(x, [(0, 1)]),
    "coalesced": lambda x: sum(part.sum() for part in dac.all_reduce_coalesced([x, x.sin()])) * x,
    "started": lambda x: dac.start(dac.all_gather_stack, x).wait(),
    "copy_to_group": dac.copy_to_group,
}


def _grad(f):
    return torch.func.grad(lambda x: (f(x) ** 3).sum())


def _plain_grad(f):
    def gradient(x):
        leaf = x if x.requires_grad else x.clone().requires_grad_()
        (found,) = torch.autograd.grad((f(leaf) ** 3).sum(), leaf, create_graph=True)
        return found

    return gradient


def _tangent(f):
    return lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1]


def _plain_tangent(f):
    """By two backward passes."""
    return lambda x: torch.autograd.functional.jvp(f, x, x.cos().detach())[1]


def _rows(f):
    return lambda x: torch.stack([f(row) for row in x])


def _plain_jacrev(f):
    return lambda x: torch.autograd.functional.jacobian(f, x)


def _plain_jacfwd(f):
    """All ranks move the same element."""
    return lambda x: torch.stack(
        [torch.autograd.functional.jvp(f, x, e)[1] for e in torch.eye(len(x)).to(x)], -1
    )


# Each with the same by plain autograd.
TRANSFORMS = {
    "grad": (_grad, _plain_grad),
    "grad of grad": (lambda f: _grad(_grad(f)), lambda f: _plain_grad(_plain_grad(f))),
    "vmap": (torch.func.vmap, _rows),
    "vmap of grad": (lambda f: torch.func.vmap(_grad(f)), lambda f: _rows(_plain_grad(f))),
    "grad of vmap": (lambda f: _grad(torch.func.vmap(f)), lambda f: _plain_grad(_rows(f))),
    "jvp": (_tangent, _plain_tangent),
    "jvp of grad": (lambda f: _tangent(_grad(f)), lambda f: _plain_tangent(_plain_grad(f))),
    "jacfwd": (torch.func.jacfwd, _plain_jacfwd),
    "jacrev": (torch.func.jacrev, _plain_jacrev),
}


def _input(rank, *shape):
    random = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def _largest_error(function, x, right, runs=1):
    """Return the largest error of several runs; NaN counts as infinite."""
    errors = torch.stack([(function(x) - right).abs().max() for _ in range(runs)])
    return errors.nan_to_num(nan=torch.inf).max().item()


def _compiled(function, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})


def _transformed(rank, pairs):
    found = {}
    for name, how in pairs:
        # Two dimensions of length 4: one to map over, and one that two ranks can share.
        x = _input(rank, 4) if how in ("jacrev", "jacfwd") else _input(rank, 4, 4)
        transform, plain = TRANSFORMS[how]
        right, function = plain(COLLECTIVES[name])(x).detach(), transform(COLLECTIVES[name])
        found[name, how, "eager"] = _largest_error(function, x, right)
        # Several runs, because garbage may be right once.
        found[name, how, "compiled"] = _largest_error(_compiled(function), x, right, runs=3)
    # Products of about ten numbers up to 100.
    return {case: error for case, error in found.items() if not error < 1e-10}


def _pairs(transforms):
    # Ranks whose results have different lengths have Jacobians, and so batches, of different lengths.
    return [(name, how) for name, how in transforms if not ("uneven" in name and how in ("jacrev", "jacfwd"))]


def test_collectives_in_every_transform():
    # All are made of one operator: each transform takes another collective.
    pairs = _pairs(zip(list(COLLECTIVES)[::2], TRANSFORMS, strict=True))
    assert run_ranks(_transformed, 2, pairs, timeout=600) == [{}, {}]


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", TRANSFORMS)
def test_every_collective_in_every_transform(how):
    assert run_ranks(_transformed, 2, _pairs((name, how) for name in COLLECTIVES), timeout=900) == [{}, {}]


MAPPED = {
    "nothing for one rank": lambda x: dac.all_to_all_dim(x, 0, 1, input_sizes=[len(x), 0]),
    "mean of conjugates": lambda x: torch.view_as_real(dac.all_reduce((x * 1j).conj(), "avg")),
}


def _mapped(rank):
    x = _input(rank, 2, 4, 3)
    pairs = {name: (torch.func.vmap(_grad(f))(x), _rows(_plain_grad(f))(x)) for name, f in MAPPED.items()}
    return {name: (one - other).abs().max().item() for name, (one, other) in pairs.items()}


def test_gradients_are_mapped_on_all_ranks_alike():
    for found in run_ranks(_mapped, 2, group_timeout=20):
        assert {name: error for name, error in found.items() if not error < 1e-12} == {}


def _cubed(x):
    return dac.all_reduce(x) ** 3


def _dual(x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_cubed(forward_ad.make_dual(x, x.cos()))).tangent


def _plain_leaf_grad(function, x):
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def _around_graphs(rank):
    x = _input(rank, 4, 3)
    mapped, hessian = torch.func.vmap(_cubed)(x), torch.func.hessian(lambda x: _cubed(x).sum())
    broken = lambda x: torch.func.vmap(_cubed)(torch._dynamo.graph_break() or x)  # noqa: E731
    return {
        "forward mode": _largest_error(_compiled(_dual), x, _dual(x)),
        "forward mode is right": _largest_error(_dual, x, _plain_tangent(_cubed)(x)),
        "three levels": _largest_error(_compiled(hessian), x, hessian(x)),
        "a break in the graph": _largest_error(_compiled(broken, fullgraph=False), x, mapped),
        "vmap of what is compiled": _largest_error(
            torch.func.vmap(_compiled(_cubed, "eager", fullgraph=False)), x, mapped
        ),
        "backward through a compiled transform": _largest_error(
            lambda x: _plain_leaf_grad(_compiled(_grad(dac.all_reduce)), x),
            x,
            _plain_leaf_grad(_plain_grad(dac.all_reduce), x),
        ),
    }


def test_transforms_around_and_beside_a_graph():
    for found in run_ranks(_around_graphs, 2, timeout=240):
        assert {name: error for name, error in found.items() if not error < 1e-10} == {}


def _counted(rank):
    """Return the collectives in the graphs of forward and backward."""
    # Slow to import, and not needed by most ranks.
    from functorch.compile import make_boxed_func  # noqa: PLC0415
    from torch._dynamo.backends.common import aot_autograd  # noqa: PLC0415

    found = {}
    for name in ("all_reduce", "all_gather", "broadcast", "reduce_scatter_dim min"):
        graphs = found[name] = []

        def keep(graph, _, graphs=graphs):
            names = [str(node.target) for node in graph.graph.nodes]
            graphs.append(sorted(n.split(".")[1] for n in names if "c10d" in n and "wait" not in n))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
        _plain_leaf_grad(_compiled(COLLECTIVES[name], backend), _input(rank, 4))
    return found


def test_each_collective_is_in_the_graph_once():
    for found in run_ranks(_counted, 2, timeout=120):
        assert found == {
            "all_reduce": [["all_reduce"], ["all_reduce"]],
            "all_gather": [["all_gather_into_tensor"], ["reduce_scatter_tensor"]],
            "broadcast": [["broadcast"], ["all_reduce"]],
            "reduce_scatter_dim min": [["all_to_all_single"], ["all_to_all_single"]],
        }


# Which of two tensors, or of two weights of a loss, each of three calls has on each rank.
CHOICES = [(0, 0, 1), (0, 1, 1)]
ALIKE = ["all_reduce", "all_reduce max", "broadcast", "all_gather", "gather", "all_to_all_dim"]


def _alike(rank, names, backend):
    """Calls that are equal on one rank: their tensors, and what flows back to them."""
    wrong, weight = {}, torch.ones(3, dtype=torch.float64, requires_grad=True)
    pair, leaves = (_input(rank, 4), _input(rank + 2, 4)), [_input(rank + k, 4) for k in range(3)]
    for name in names:
        call = COLLECTIVES[name]

        def of_equal_tensors(*pair, call=call):
            # The graph has a gradient: otherwise AOTAutograd merges nothing.
            return torch.stack([call(pair[one]).sum() for one in CHOICES[rank]]) * weight

        def of_equal_cotangents(*leaves, call=call):
            chosen = zip(CHOICES[rank], leaves, strict=True)
            return sum((1.0 + one) * call(leaf * (k + 1)).sum() for k, (one, leaf) in enumerate(chosen))

        def gradients(function, leaves=leaves):
            inputs = [leaf.clone().requires_grad_() for leaf in leaves]
            return torch.stack(torch.autograd.grad(function(*inputs), inputs))

        values = of_equal_tensors(*pair)
        errors = {
            "tensors": _largest_error(lambda f: f(*pair), _compiled(of_equal_tensors, backend), values),
            "cotangents": _largest_error(
                gradients, _compiled(of_equal_cotangents, backend), gradients(of_equal_cotangents)
            ),
        }
        wrong |= {(name, what): error for what, error in errors.items() if not error < 1e-12}
    return wrong


@pytest.mark.parametrize("names", [ALIKE[::3], pytest.param(ALIKE, marks=pytest.mark.exhaustive)])
def test_calls_that_are_equal_on_one_rank_only_are_not_merged(names):
    assert run_ranks(_alike, 2, names, "aot_eager", timeout=180, group_timeout=60) == [{}, {}]


def _inductor(rank):
    x, gather = _input(rank, 4, 3), lambda x: dac.all_gather_cat(x[: 1 + rank], sizes=[1, 2]) ** 2
    return _largest_error(_compiled(_grad(gather), "inductor"), x, _plain_grad(gather)(x))


@pytest.mark.exhaustive  # a minute of C++ compilers
def test_inductor_compiles_collectives():
    assert max(run_ranks(_inductor, 2, timeout=240)) < 1e-10


# For a rank of each, all that it sends or receives is empty, forward or backward.
ONE_WAY = {
    "several": lambda x: dac.broadcast(dac.all_reduce(dac.reduce(x.sin(), 1)), 0),
    "reduce": lambda x: dac.reduce(x.sin(), 1),
    "gather, then all_reduce": lambda x: dac.all_reduce(dac.gather(x.sin(), 1)[0]),
    "all_reduce, then permute": lambda x: dac.permute(dac.all_reduce(x.sin()), [(0, 1)]),
    "all_reduce, then broadcast, replicated": lambda x: dac.broadcast(
        dac.all_reduce(x.sin()), 1, grad="replicated"
    ),
}


def _one_way_by_inductor(rank, names):
    x, found = _input(rank, 4, 3), {}
    for name in names:
        square = lambda x, function: function(x) ** 2  # noqa: E731
        plain, compiled = (
            partial(_plain_leaf_grad, partial(square, function=function))
            for function in (ONE_WAY[name], _compiled(ONE_WAY[name], "inductor"))
        )
        found[name] = _largest_error(compiled, x, plain(x))
    return {name: error for name, error in found.items() if not error < 1e-12}


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("names", [["several"], pytest.param(list(ONE_WAY), marks=pytest.mark.exhaustive)])
def test_inductor_leaves_collectives_of_empty_tensors_in_backward(names, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")  # it does not see changes in this package
    assert run_ranks(_one_way_by_inductor, 2, names, timeout=240, group_timeout=30) == [{}, {}]


@pytest.mark.exhaustive
def test_inductor_merges_no_calls_that_are_equal_on_one_rank_only():
    """It removes what changes nothing, slices of the whole for example, before AOTAutograd merges."""
    assert run_ranks(_alike, 2, ALIKE[:1], "inductor", timeout=400, group_timeout=200) == [{}, {}]


def _several_shapes(rank):
    found = {}
    for name in ("reduce", "all_reduce max"):
        compiled = _compiled(COLLECTIVES[name])
        for rows in (4, 6, 8):  # the second one makes the shape symbolic
            x = _input(rank, rows, 2)
            right = _plain_leaf_grad(COLLECTIVES[name], x)
            found[name, rows] = _largest_error(lambda x, of=compiled: _plain_leaf_grad(of, x), x, right)
    return {case: error for case, error in found.items() if not error < 1e-12}


def test_a_compiled_backward_for_several_shapes():
    assert run_ranks(_several_shapes, 2, timeout=120) == [{}, {}]


def _of_one(call):
    """A function of one argument: make_fx counts those of a signature."""

    def of_one(x):
        return call(x)

    return of_one


def _recorded(rank, length, names):
    """A recorded graph communicates, also for what ``linearize`` computes beforehand."""
    wrong = {}
    x, tangent = _input(rank, length), _input(rank + 7, length)
    for name in names:
        call = COLLECTIVES[name]
        value, derivative = call(tangent), torch.func.jvp(call, (x,), (tangent,))[1]
        gradient = _plain_grad(call)(tangent).detach()
        recorded = make_fx(_of_one(call))(x)
        ways = {
            "linearize": (torch.func.linearize(call, x)[1], derivative),
            "make_fx": (recorded, value),
            "symbolic": (make_fx(_of_one(call), tracing_mode="symbolic")(x), value),
            "functionalize": (torch.func.functionalize(call), value),
            "gradient": (make_fx(_of_one(_grad(call)))(x), gradient),
        }
        for way, (function, right) in ways.items():
            error = _largest_error(function, tangent, right, runs=2)
            if not error <= 1e-12 * right.abs().max().clamp(min=1).item():
                wrong[name, way] = error
    return wrong, dac.all_reduce(torch.ones(2)).tolist()


@pytest.mark.parametrize(
    ("length", "names"),
    [
        (4, list(COLLECTIVES)[::2]),
        (50_000, ["all_reduce", "broadcast"]),  # what Gloo itself sums or broadcasts
        pytest.param(4, list(COLLECTIVES), marks=pytest.mark.exhaustive),
        pytest.param(50_000, list(COLLECTIVES), marks=pytest.mark.exhaustive),
    ],
)
def test_a_recorded_graph_communicates_and_so_does_the_next_call(length, names):
    assert run_ranks(_recorded, 2, length, names, timeout=120, group_timeout=20) == [({}, [2, 2])] * 2


def _refused(rank):
    """What needs shapes that only another rank knows has no graph; nothing is sent."""
    for transform in (make_fx, torch.func.vmap):
        with pytest.raises(ValueError, match="anchored works neither"):
            transform(lambda x: dac.all_reduce(dac.anchored(x)))(torch.ones(2, 2))
    with pytest.raises(ValueError, match="'auto' cannot be traced"):
        make_fx(lambda x: dac.all_gather_cat(x, sizes="auto"))(torch.ones(2))
    return dac.all_reduce(torch.ones(1)).item()


def test_what_cannot_be_recorded_is_refused():
    assert run_ranks(_refused, 2, group_timeout=20) == [2, 2]


def _batched(rank):
    x, wrong = torch.tensor([1.0, 2.0]).mul(rank + 1).requires_grad_(), {}
    for name in ("all_reduce", "all_reduce max", "all_gather_cat", "started"):
        y = COLLECTIVES[name](x).flatten()
        rows = [torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in torch.eye(len(y))]
        (at_once,) = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, retain_graph=True)
        if not torch.equal(at_once, torch.stack(rows)):
            wrong[name] = at_once, rows
    return wrong


def _batched_twice(rank):
    """The second derivatives of the rows at once, and one by one."""
    x, wrong = torch.tensor([1.0, 2.0]).mul(rank + 1).requires_grad_(), {}
    for name in ("all_reduce", "all_gather_cat", "started"):
        y = COLLECTIVES[name](x).flatten() ** 3
        one_by_one = [torch.autograd.grad(y, x, row, create_graph=True)[0] for row in torch.eye(len(y))]
        (at_once,) = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, create_graph=True)
        found, right = (
            torch.autograd.grad(each.sum(), x, retain_graph=True)[0]
            for each in (at_once, torch.stack(one_by_one))
        )
        if not torch.equal(found, right):
            wrong[name] = found, right
    return wrong


@pytest.mark.parametrize("function", [_batched, _batched_twice])
def test_batches_of_gradients(function):
    assert run_ranks(function, 2, group_timeout=30) == [{}, {}]


BACKWARDS = {
    "all_reduce": lambda x: dac.all_reduce(x * x),
    "all_reduce max": lambda x: dac.all_reduce(x * x, "max"),
    "all_gather_cat": lambda x: dac.all_gather_cat(x * x),
    "started": lambda x: dac.start(dac.all_reduce, x * x).wait(),
    "started max": lambda x: dac.start(dac.all_reduce, x * x, "max").wait(),
}


def _backward(y, x):
    return lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0]


def _backwards_of_eager_graphs(rank):
    """Transform, or record, the backward of a graph that exists, for which nobody asks for a further one."""
    found = {}
    for name, collective in BACKWARDS.items():
        x = torch.tensor([1.0, 2.0, 3.0 + rank], dtype=torch.float64, requires_grad=True)
        y = collective(x)
        back = _backward(y, x)
        v = torch.arange(y.numel(), dtype=torch.float64) + rank
        plain = back(v)
        rows = torch.stack([v, v.cos()])
        found[name] = {
            "make_fx": torch.equal(make_fx(back)(v)(v), plain),
            "vmap": torch.equal(torch.func.vmap(back)(rows), torch.stack([plain, back(v.cos())])),
            "jvp": torch.equal(torch.func.jvp(back, (v,), (v.cos(),))[1], back(v.cos())),
        }
    return found


def test_the_backward_of_an_eager_graph_is_seen_by_what_transforms_or_records_it():
    for found in run_ranks(_backwards_of_eager_graphs, 2):
        assert found == {name: dict.fromkeys(["make_fx", "vmap", "jvp"], True) for name in BACKWARDS}


def _hessian_product(rank):
    x = torch.tensor(1.0 + rank, dtype=torch.float64, requires_grad=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        (gradient,) = torch.autograd.grad(dac.all_reduce(dual) ** 3, dual)
        return forward_ad.unpack_dual(gradient).tangent.item()


def test_forward_mode_over_a_backward_without_a_graph():
    """Of 2 (x + y)^3, both ranks' losses, at (1, 2), along (1, 1): 2 * 6 * 3 * 2."""
    assert run_ranks(_hessian_product, 2) == [72.0, 72.0]


def _handles_of_outside(_):
    x = torch.tensor([1.0, 2.0], requires_grad=True)

    def wait_inside(transform):
        handle = dac.start(dac.all_reduce, 2 * x, "max")
        found = transform(handle)
        (gradient,) = torch.autograd.grad(handle.wait().sum(), x)
        return found.tolist(), gradient.tolist()

    rows = torch.ones(3, 2)
    return {
        "vmap": wait_inside(lambda h: torch.func.vmap(lambda row: row * h.wait())(rows)[0]),
        "jvp": wait_inside(lambda h: torch.func.jvp(lambda v: v * h.wait(), (rows[0],), (rows[0],))[1]),
        "compile": wait_inside(lambda h: torch.compile(lambda v: v * h.wait(), backend="eager")(rows[0])),
    }


def test_a_handle_of_outside_is_a_constant_inside():
    for found in run_ranks(_handles_of_outside, 2):
        assert found == dict.fromkeys(["vmap", "jvp", "compile"], ([2.0, 4.0], [2.0, 2.0]))


def _handle_in_a_recorded_graph(_):
    handle, ones = dac.start(dac.all_reduce, torch.ones(2)), torch.ones(2)
    recorded = make_fx(lambda v: v * handle.wait())(ones)
    return [each.tolist() for each in (recorded(ones), recorded(ones), handle.wait())]


def test_a_recorded_graph_does_not_repeat_the_sum_of_a_handle():
    assert run_ranks(_handle_in_a_recorded_graph, 2) == [[[2.0, 2.0]] * 3] * 2
