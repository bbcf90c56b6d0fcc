"""Collectives work with torch.func, forward mode, checkpointing and torch.compile."""

import pytest
import torch
import torch.distributed as dist
from collective_cases import CASES, inputs
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import dist_autograd_collectives as dac
from dist_utils.testing import run_ranks

NAMES = ["all_reduce SUM", "all_reduce MAX", "all_reduce PRODUCT", "reduce SUM", "reduce_scatter AVG"]
NAMES += ["reduce_scatter MAX", "broadcast last", "gather last", "all_gather", "all_to_all_single"]


# Every kind of collective once.
COMPILED = ["all_reduce MAX", "reduce SUM", "reduce_scatter AVG", "broadcast last", "gather last"]
COMPILED += ["scatter first", "all_to_all", "all_gather", "all_gather_cat, uneven", "permute some"]
COMPILED += ["reduce_scatter_dim MAX, uneven", "all_to_all_dim", "all_reduce_coalesced SUM"]
COMPILED += ["all_gather_cat_coalesced", "reduce_scatter_dim_coalesced"]


def total(case, x, ranks):
    return sum((output**2).sum() for output in case.call(x, None, ranks))


def _transforms(rank):
    ranks = [0, 1]
    wrong = {}
    for name in NAMES:
        case = CASES[name]
        x = inputs(rank, (2, 3), torch.float64, ties=False).requires_grad_()
        plain = x.detach()
        (right,) = torch.autograd.grad(total(case, x, ranks), x)
        results = {"func.grad": torch.func.grad(lambda x, case=case: total(case, x, ranks))(plain)}
        _, tangent = torch.func.jvp(lambda x, case=case: total(case, x, ranks), (plain,), (plain,))
        results["jvp is defined"] = right if tangent.isfinite() else right + 1
        if "reduce_scatter" not in name and "single" not in name:  # output buffers are not batched
            batch = torch.stack([plain, 2 * plain])
            one_by_one = torch.stack(
                [torch.autograd.grad(total(case, x, ranks), x)[0] for x in map(_leaf, batch)]
            )
            mapped = torch.func.vmap(torch.func.grad(lambda x, case=case: total(case, x, ranks)))(batch)
            wrong[name, "vmap of grad"] = (mapped - one_by_one).abs().max().item()
        for reentrant in (False, True):
            again = _leaf(plain)
            checkpoint(lambda x, case=case: total(case, x, ranks), again, use_reentrant=reentrant).backward()
            results["checkpoint", reentrant] = again.grad
        for what, gradient in results.items():
            wrong[name, what] = (gradient - right).abs().max().item()
    return {key: error for key, error in wrong.items() if not error < 1e-12}


def _leaf(x):
    return x.detach().clone().requires_grad_()


def test_transforms_give_the_same_gradients():
    assert run_ranks(_transforms, 2, timeout=120) == [{}, {}]


def _jvp(rank):
    """Forward mode against reverse mode: <u, J v> = <J^T u, v>, summed over the ranks."""
    found = {}
    for name in ["all_reduce SUM", "all_reduce MAX", "broadcast last", "all_gather"]:
        case = CASES[name]
        x = inputs(rank, (2, 3), torch.float64, ties=False)
        v = torch.full_like(x, 1.0 + rank)
        output, tangent = torch.func.jvp(lambda x, case=case: case.call(x, None, [0, 1])[0], (x,), (v,))
        leaf = _leaf(x)
        case.call(leaf, None, [0, 1])[0].backward(torch.ones_like(output))
        sides = torch.stack([tangent.sum(), (leaf.grad * v).sum()])
        dist.all_reduce(sides)
        found[name] = (sides[0] - sides[1]).abs().item()
    return found


def test_forward_mode_is_the_transpose_of_reverse_mode():
    for found in run_ranks(_jvp, 2):
        assert max(found.values()) < 1e-12


def _compiled(rank, backend, names):
    ranks = [0, 1]
    wrong = {}
    for name in names:
        case = CASES[name]
        eager, compiled = (_leaf(inputs(rank, (2, 3), torch.float64, ties=False)) for _ in range(2))
        total(case, eager, ranks).backward()
        torch._dynamo.reset()
        fn = torch.compile(lambda x, case=case: total(case, x, ranks), backend=backend, fullgraph=True)
        fn(compiled).backward()
        wrong[name] = (eager.grad - compiled.grad).abs().max().item()
    return {name: error for name, error in wrong.items() if not error < 1e-12}


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        pytest.param("aot_eager", COMPILED, marks=pytest.mark.exhaustive),
        ("inductor", ["reduce_scatter AVG", "permute some"]),
        pytest.param("inductor", COMPILED, marks=pytest.mark.exhaustive),
    ],
    ids=["aot_eager", "inductor", "inductor, every collective"],
)
def test_compiled_as_one_graph(backend, names):
    assert run_ranks(_compiled, 2, backend, names, timeout=600) == [{}, {}]


def _counted(rank):
    found = {}
    for name in ("all_reduce SUM", "all_gather", "broadcast last", "reduce_scatter MAX", "all_reduce MAX"):
        graphs = []

        def keep(graph, _, graphs=graphs):
            graphs.append(graph)
            return graph

        case = CASES[name]
        torch._dynamo.reset()
        fn = torch.compile(
            lambda x, case=case: total(case, x, [0, 1]),
            backend=aot_autograd(fw_compiler=keep, bw_compiler=keep),
            fullgraph=True,
        )
        fn(_leaf(inputs(rank, (2, 3), torch.float64))).backward()
        found[name] = [
            sorted(
                str(node.target).split(".")[1]
                for node in graph.graph.nodes
                if "c10d" in str(node.target) and "wait" not in str(node.target)
            )
            for graph in graphs
        ]
    return found


def test_each_collective_is_in_the_graph_once():
    for found in run_ranks(_counted, 2, timeout=120):
        # torch 2.6 reruns a MAX in backward instead of keeping what it received.
        again = ["all_gather_into_tensor", "all_to_all_single"]
        if found["all_reduce MAX"][1] == sorted([*again, "all_to_all_single", "reduce_scatter_tensor"]):
            found["all_reduce MAX"][1] = ["all_to_all_single", "reduce_scatter_tensor"]
        assert found == {
            "all_reduce SUM": [["all_reduce"], ["all_reduce"]],
            "all_gather": [["all_gather_into_tensor"], ["reduce_scatter_tensor"]],
            "broadcast last": [["broadcast"], ["all_reduce"]],
            "reduce_scatter MAX": [["all_to_all_single"], ["all_to_all_single"]],
            "all_reduce MAX": [
                ["all_gather_into_tensor", "all_to_all_single"],
                ["all_to_all_single", "reduce_scatter_tensor"],
            ],
        }


def _large_reduce(rank):
    """Too large for the path of small sums, and not divisible by the world size."""
    x = (torch.arange(50_001.0) + rank).requires_grad_()
    total = torch.compile(lambda x: dac.reduce(x, 1), backend="aot_eager", fullgraph=True)(x)
    (2 * total).sum().backward()
    expected = 2 * torch.arange(50_001.0) + 1 if rank == 1 else torch.zeros(50_001)
    return torch.equal(total, expected) and torch.equal(x.grad, torch.full((50_001,), 2.0))


def test_a_large_sum_for_one_rank_is_compiled_too():
    assert run_ranks(_large_reduce, 2) == [True, True]


# Here ranks save different tensors for backward: a checkpoint must rerun the collective on all of them.
UNEQUAL = {
    "reduce MAX": lambda x: dac.reduce(x, 0, "max").sum(),
    "reduce MAX of a product": lambda x: dac.reduce(x * x, 0, "max").sum(),
    "gather used on the root": lambda x: torch.stack(dac.gather(x * x, 0)).prod(0).sum(),
    "scatter": lambda x: dac.scatter([x * x, x], 1).sum(),
}


def _unequal_checkpoints(rank):
    wrong = []
    for name, fn in UNEQUAL.items():
        plain, again = (_leaf(inputs(rank, (2, 3), torch.float64, ties=False)) for _ in range(2))
        fn(plain).backward()
        checkpoint(fn, again, use_reentrant=False).backward()
        if not torch.equal(plain.grad, again.grad):
            wrong.append(name)
    return wrong


def test_a_checkpoint_brings_every_rank_back_to_the_collective():
    assert run_ranks(_unequal_checkpoints, 2, group_timeout=30) == [[], []]


def _several_shapes(rank):
    wrong = []
    for name in ("reduce SUM", "broadcast last", "reduce MAX", "permute some", "all_gather", "gather last"):
        case = CASES[name]
        torch._dynamo.reset()
        fn = torch.compile(lambda x, case=case: total(case, x, [0, 1]), backend="aot_eager", fullgraph=True)
        for rows in (4, 6, 8):  # the second one makes the shape symbolic
            eager, compiled = (_leaf(inputs(rank, (rows, 3), torch.float64, ties=False)) for _ in range(2))
            total(case, eager, [0, 1]).backward()
            fn(compiled).backward()
            if not (eager.grad - compiled.grad).abs().max().item() < 1e-12:
                wrong.append((name, rows))
    return wrong


def test_compiled_for_several_shapes():
    assert run_ranks(_several_shapes, 2, timeout=120) == [[], []]
