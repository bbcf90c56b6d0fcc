"""Calls that are wrong on one rank, or differ between ranks: an error on every rank, and no garbage."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_autograd_collectives import copies
from dist_utils.testing import patience, run_ranks

X = torch.ones(4, 2)
LIST = [torch.ones(2)] * 2

# Each function with valid arguments, and invalid ones for one rank.
GOOD = {
    "all_reduce": (X,),
    "broadcast": (X, 0),
    "reduce": (X, 0),
    "all_gather": (X,),
    "all_gather_base": (torch.zeros(8, 2), X),
    "gather": (X, 0),
    "scatter": (LIST, 0),
    "reduce_scatter": (torch.zeros(2), LIST),
    "all_to_all": ([torch.zeros(2)] * 2, LIST),
    "all_to_all_single": (torch.zeros(4, 2), X),
    "all_gather_cat": (X,),
    "all_gather_stack": (X,),
    "reduce_scatter_dim": (X,),
    "all_to_all_dim": (X, 0, 1),
    "permute": (X, [(0, 1), (1, 0)]),
    "copy_to_group": (X,),
    "all_reduce_coalesced": (LIST,),
    "all_gather_cat_coalesced": (LIST,),
    "reduce_scatter_dim_coalesced": (LIST,),
}
SPARSE = torch.eye(2).to_sparse()
BAD = {
    "scatter": [
        ((None, 0), {}),
        (([torch.ones(2), torch.ones(3)], 0), {}),
        (([torch.ones(2)] * 3, 0), {}),
        ((LIST, 0), {"like": torch.ones(2)}),
        ((LIST, 0), {"like": 3}),
        ((LIST, 1), {}),
        ((LIST, 0), {"anchor": LIST[0]}),
        (([torch.ones([1] * 40)] * 2, 0), {}),
        (([torch.ones(2, device="meta")] * 2, 0), {}),
    ],
    "all_to_all": [
        ((None, LIST), {}),
        (([torch.zeros(2)] * 3, LIST), {}),
        (([torch.zeros(3), torch.zeros(2)], LIST), {}),
        (([torch.zeros(2), torch.zeros(3)], [torch.zeros(3), torch.zeros(2)]), {}),
    ],
    "all_to_all_single": [
        ((torch.zeros(4, 2), X, torch.tensor([2, 2])), {}),
        ((torch.zeros(4, 2), X, [3, 1], [2, 2]), {}),
        ((torch.zeros(4, 2), X, [2.0, 2.0], [2, 2]), {}),
        ((None, X), {}),
    ],
    "reduce_scatter": [((torch.zeros(2), LIST * 2), {}), ((torch.zeros(2), []), {}), ((None, LIST), {})],
    "all_gather_cat": [((X,), {"sizes": torch.tensor([4, 4])}), ((X, 2), {}), ((X, None), {})],
    "all_to_all_dim": [
        ((X, 0, 1), {"output_sizes": [3, 3]}),
        ((X, "a", 1), {}),
        ((X.reshape(2, 4), 0, 1), {}),  # parts with the same number of elements
        ((X, 0, 1), {"input_sizes": [1, 3]}),
        ((X, 0, 1), {"output_sizes": "auto"}),
    ],
    "permute": [((X, None), {}), ((X, [(0, 0), (1, 0)]), {}), ((X, [(0.5, 1)]), {}), ((X, [0, 1]), {})],
    "all_reduce": [
        ((X, "median"), {}),
        ((X,), {"grad": "mean"}),
        ((), {}),
        ((X,), {"nothing": 1}),
        ((SPARSE,), {}),
    ],
    "broadcast": [((X, 5), {}), ((X,), {"group_src": 0.5}), ((X,), {}), ((X.double(), 0), {})],
    "all_gather_base": [((torch.zeros(3), X), {}), ((None, X), {})],
    "all_reduce_coalesced": [(([],), {}), (([X, None],), {}), ((X[0],), {})],
}


def _outcome(fn, *args, **kwargs):
    try:
        fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - any error is an outcome
        return type(error).__name__, str(error)
    return None


def _one_is_wrong(rank, wrong_rank):
    """One rank after another is wrong; the group still works afterwards."""
    bad = []
    for name, good in GOOD.items():
        function = getattr(dac, name)
        nothing = [((None, *good[1:]), {}), (("text", *good[1:]), {}), ((3, *good[1:]), {})]
        for args, options in nothing + BAD.get(name, []):
            if name == "scatter" and args[0] is None and wrong_rank:
                continue  # valid on a rank that is not the source
            mine = (args, options) if rank == wrong_rank else (good, {})
            outcome = _outcome(function, *mine[0], **mine[1], check=True)
            # The wrong rank raises its own error; a mere difference raises the same error on every rank.
            told = outcome is not None and outcome[0] == "TensorMismatchError"
            own = outcome is not None and outcome[0] in ("TypeError", "ValueError", "IndexError")
            if not (told or (own and rank == wrong_rank)):
                bad.append((name, str(args), str(options), outcome))
        if _outcome(function, *good, check=True) is not None:
            bad.append((name, "good"))
    return bad


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_check_tells_every_rank_of_what_is_wrong_on_one(wrong_rank):
    assert run_ranks(_one_is_wrong, 2, wrong_rank, group_timeout=30) == [[], []]


def _three_with_one_wrong(rank):
    calls = {
        "none": lambda: dac.scatter(None if rank == 0 else [X] * 3, 0, check=True),
        "lengths": lambda: dac.scatter([X, X, X[:1]] if rank == 1 else None, 1, check=True),
        "like": lambda: dac.scatter([X] * 3 if rank == 2 else None, 2, like=None if rank else X, check=True),
        "environment": lambda: dac.all_gather(None if rank == 2 else X),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_AUTOGRAD_CHECK", "1")
        return {name: _outcome(call) for name, call in calls.items()}


def test_the_user_s_own_error_is_on_the_rank_that_is_wrong():
    found = run_ranks(_three_with_one_wrong, 3, group_timeout=30)
    for name, wrong, own in (
        ("none", 0, ("ValueError", "the source needs a list of 3 tensors")),
        ("environment", 2, ("TypeError", "tensor must be a tensor, got None")),
    ):
        for rank, seen in enumerate(found):
            told = ("TensorMismatchError", f"rank {wrong} cannot go on: {own[0]}: {own[1]}")
            assert seen[name] == (own if rank == wrong else told)
    assert [seen["lengths"][0] for seen in found] == [
        "TensorMismatchError",
        "ValueError",
        "TensorMismatchError",
    ]
    assert [seen["like"][0] for seen in found] == ["TensorMismatchError"] * 3
    assert "with like=" in found[1]["like"][1]


def _own_part(rank):
    """Detected without other ranks, so raised with and without check."""
    return [
        _outcome(dac.all_to_all, [torch.zeros(1), torch.zeros(2)], [torch.ones(2), torch.ones(1)]),
        _outcome(dac.all_to_all_single, torch.zeros(3), torch.ones(3), [1, 2], [2, 1]),
        _outcome(dac.all_to_all_dim, torch.ones(3), 0, 0, input_sizes=[1, 2], output_sizes=[2, 1]),
    ]


def test_a_part_that_a_rank_keeps_has_one_length():
    for outcomes in run_ranks(_own_part, 2, group_timeout=30):
        assert [kind for kind, _ in outcomes] == ["ValueError"] * 3


LENGTHS = {
    "all_reduce": dac.all_reduce,
    "all_reduce max": lambda x, **group: dac.all_reduce(x, "max", **group),
    "reduce": lambda x, **group: dac.reduce(x, 0, **group),
    "broadcast": lambda x, **group: dac.broadcast(x, 1, **group),
    "broadcast, the other way": lambda x, **group: dac.broadcast(x, 0, **group),
    "all_gather": dac.all_gather,
    "gather": lambda x, **group: dac.gather(x, 0, **group),
    "scatter": lambda x, **group: dac.scatter([x, x], 1, like=x, **group),
    "permute": lambda x, **group: dac.permute(x, [(0, 1), (1, 0)], **group),
    "all_to_all_dim": lambda x, **group: dac.all_to_all_dim(x, 0, 0, **group),
    "reduce_scatter_dim": dac.reduce_scatter_dim,
}


def _lengths_differ(rank, limit):
    seen = {}
    # One group per case: after a failure a group cannot be used again.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in LENGTHS]
    for (name, call), group in zip(LENGTHS.items(), groups, strict=True):
        dist.barrier()
        seen[name] = _outcome(call, torch.full((2 if rank else 4,), 1.0 + rank), group=group)
    # A large broadcast that is too short is detected at once, so the group's timeout does not matter.
    dist.barrier()
    short = _outcome(dac.broadcast, torch.ones(20_000 if rank else 50_000), 1)
    return seen, short


def test_messages_of_another_length_fill_no_buffer():
    (first, short), (second, _) = run_ranks(_lengths_differ, 2, patience(0.5), timeout=90)
    for name in LENGTHS:
        kinds = {outcome and outcome[0] for outcome in (first[name], second[name])}
        # A sender need not notice that nobody receives, but the rank that waits does.
        assert "CollectiveError" in kinds <= {"CollectiveError", None}, name
        failed = first[name] or second[name]
        assert "check=True tells at once" in failed[1]
    for name in ("reduce", "gather", "all_reduce", "all_gather"):
        assert first[name] is not None
    assert short[0] == "CollectiveError"
    assert "sent less than the 200000 bytes" in short[1]


def _batched(rank):
    x = torch.tensor([1.0, 2.0, 3.0]).mul(rank + 1).requires_grad_()
    wrong = []
    for name, call in {
        "all_reduce": dac.all_reduce,
        "max": lambda x: dac.all_reduce(x, "max"),
        "gathered": dac.all_gather_cat,
        "started": lambda x: dac.start(dac.all_reduce, x).wait(),
    }.items():
        y = call(x)
        rows = [torch.autograd.grad(y, x, row, retain_graph=True)[0] for row in torch.eye(len(y))]
        (at_once,) = torch.autograd.grad(y, x, torch.eye(len(y)), is_grads_batched=True, retain_graph=True)
        if not torch.equal(at_once, torch.stack(rows)):
            wrong.append(name)
        jacobian = torch.autograd.functional.jacobian(call, x, vectorize=True)
        if not torch.equal(jacobian, at_once):
            wrong.append((name, "jacobian"))
    return wrong


def test_batches_of_gradients():
    assert run_ranks(_batched, 2, group_timeout=30) == [[], []]


def _destroyed(rank):
    group = dist.new_group([0, 1])
    x = torch.ones(2, requires_grad=True)
    y = dac.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    found = _outcome(y.sum().backward)
    connected = dac.connect(y.sum() * 0, dac.all_gather(x), [y])
    return found, connected.item(), _outcome(dac.connect, x.sum(), 3)


def test_backward_after_the_group_is_gone_and_lists_that_are_connected():
    for rank, (found, connected, refused) in enumerate(run_ranks(_destroyed, 2)):
        assert found[0] == "CollectiveError"
        assert f"all_reduce(SUM) cannot communicate on rank {rank} of 2 in its group, which was" in found[1]
        assert connected == 0
        assert refused == ("TypeError", "each output must be a tensor, got a int")


def _group_is_none(rank):
    """The others wait in WORLD, which the rank that is wrong may have meant."""
    wrong = _outcome(dac.all_reduce, X, group="text" if rank else None, check=True)
    return wrong, dac.all_reduce(torch.ones(1), check=True).item()


def test_a_rank_without_a_group_tells_the_others():
    (told, first), (own, second) = run_ranks(_group_is_none, 2, group_timeout=30)
    assert own[0] == "TypeError"
    assert told == ("TensorMismatchError", f"rank 1 cannot go on: TypeError: {own[1]}")
    assert first == second == 2


def _never_compares(rank, limit):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=limit))
    dist.barrier()
    found = None if rank else _outcome(dac.all_reduce, X, group=group, check=True)
    dist.barrier()
    return found


def test_a_comparison_that_fails_names_the_function():
    found, _ = run_ranks(_never_compares, 2, patience(0.5), group_timeout=30)
    assert found[0] == "CollectiveError"
    assert "comparison of check=True failed on rank 0 of 2 in the group of all_reduce(SUM)" in found[1]


def _cannot_hold(rank):
    """The receiver learns from the source what it gets, and has no room for that."""
    if rank:
        copies.stand_in = _no_room
    seen = [_outcome(dac.scatter, None if rank else LIST, 0, check=True)]
    seen.append(_outcome(dac.all_reduce, X, check=True))
    return seen


def _no_room(*_):
    raise dac.CollectiveError("no room")


def test_the_source_of_a_scatter_hears_of_a_rank_that_cannot_hold_its_part():
    (told, after), (own, _) = run_ranks(_cannot_hold, 2, group_timeout=30)
    assert own == ("CollectiveError", "no room")
    assert told == ("TensorMismatchError", "rank 1 cannot go on: CollectiveError: no room")
    assert after is None


SHAPES = {
    "all_reduce": dac.all_reduce,
    "max": lambda x, **group: dac.all_reduce(x, "max", **group),
    "all_gather": dac.all_gather,
    "all_gather_base": lambda x, **group: dac.all_gather_base(torch.empty(12), x, **group),
    "broadcast": lambda x, **group: dac.broadcast(x, 1, **group),
    "scatter": lambda x, **group: dac.scatter([x, x], 0, **group),
    "coalesced": lambda x, **group: dac.all_reduce_coalesced([x], **group),
}


def _ones_differ(rank, limit, shapes):
    seen = {}
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in SHAPES]
    for (name, call), group in zip(SHAPES.items(), groups, strict=True):
        dist.barrier()
        seen[name] = _outcome(call, torch.ones(shapes[rank]), group=group)
    return seen


@pytest.mark.parametrize("shapes", [((2, 3), (2, 1, 3)), ((2, 3), (3, 2))], ids=["ones", "order"])
def test_shapes_of_equal_lengths_do_not_fit_each_other(shapes):
    first, second = run_ranks(_ones_differ, 2, patience(0.5), shapes, timeout=90)
    for name in SHAPES:
        kinds = {outcome and outcome[0] for outcome in (first[name], second[name])}
        assert "CollectiveError" in kinds <= {"CollectiveError", None}, name
