"""Ranks that never reach a collective: the others' errors, and how to avoid them."""

import functools
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import dist_autograd_collectives as dac
from dist_utils import TensorMismatchError
from dist_utils.testing import patience, run_ranks, stop_process

# In each, rank 0 waits for rank 1 in backward.
CALLS = {
    "all_reduce(SUM)": dac.all_reduce,
    "all_reduce(MAX)": lambda x, **options: dac.all_reduce(x, "max", **options),
    "broadcast": lambda x, **options: dac.broadcast(x, 0, **options),
    "reduce(SUM)": lambda x, **options: dac.reduce(x, 1, **options),
    "all_gather": lambda x, **options: dac.all_gather(x, **options)[1],
    "all_gather_base": lambda x, **options: dac.all_gather_base(torch.empty(4), x, **options),
    "gather": lambda x, **options: dac.gather(x, 1, **options)[0],
    "scatter": lambda x, **options: dac.scatter([x, x], 0, **options),
    "reduce_scatter(SUM)": lambda x, **options: dac.reduce_scatter(torch.empty(2), [x, x], **options),
    "all_to_all": lambda x, **options: dac.all_to_all([torch.empty(2)] * 2, [x, x], **options)[1],
    "all_to_all_single": lambda x, **options: dac.all_to_all_single(torch.empty(2), x, **options),
    "all_gather_cat": dac.all_gather_cat,
    "reduce_scatter_dim(SUM)": dac.reduce_scatter_dim,
    "permute": lambda x, **options: dac.permute(x, [(0, 1), (1, 0)], **options),
    "copy_to_group": dac.copy_to_group,
}


def _unused(rank, limit, titles):
    """Rank 1 does not use its output: first with ``connect``, then without."""
    seen = {}
    # One group per case: after a failure a group cannot be used again.
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=limit)) for _ in titles]
    for title, group in zip(titles, groups, strict=True):
        call = CALLS[title]
        dist.barrier()
        x = torch.ones(2, requires_grad=True)
        y = call(x, group=group)
        loss = y.sum() if rank == 0 else (x * 3).sum()
        dac.connect(loss, y).backward()
        cured = x.grad.tolist()
        x.grad = None
        y = call(x, group=group)
        loss = y.sum() if rank == 0 else (x * 3).sum()
        try:
            loss.backward()
        except dac.CollectiveError as error:
            seen[title] = cured, str(error)
        else:
            seen[title] = cured, None
    return seen


SOME = ["all_reduce(SUM)", "broadcast", "all_to_all", "permute"]


@pytest.mark.parametrize(
    "titles", [SOME, pytest.param([*CALLS], marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_an_unused_output_ends_in_an_error_with_the_name_and_connect_cures_it(titles):
    first, second = run_ranks(_unused, 2, patience(0.5), titles, timeout=100)
    for title in titles:
        assert first[title][1] is not None, title
        assert f"the backward of {title} failed on rank 0 of 2 in its group" in first[title][1]
        assert "see connect" in first[title][1]
        assert second[title][1] is None
    assert (first["all_reduce(SUM)"][0], second["all_reduce(SUM)"][0]) == ([1, 1], [4, 4])
    assert (first["broadcast"][0], second["broadcast"][0]) == ([1, 1], [3, 3])
    assert (first["permute"][0], second["permute"][0]) == ([0, 0], [4, 4])


def _one_rank_needs_a_gradient(rank):
    seen = {}
    for title, call in CALLS.items():
        x = torch.ones(2, requires_grad=rank == 0)
        (call(x, anchor=True).sum() * (1 + rank)).backward()
        seen[title] = None if x.grad is None else x.grad.tolist()
    return seen


def test_an_anchor_lets_ranks_without_a_gradient_take_part():
    first, second = run_ranks(_one_rank_needs_a_gradient, 2, group_timeout=30)
    assert set(second.values()) == {None}
    # The two ranks' cotangents are 1 and 2.
    assert first == {
        "all_reduce(SUM)": [3, 3],
        "all_reduce(MAX)": [1.5, 1.5],
        "broadcast": [3, 3],
        "reduce(SUM)": [2, 2],
        "all_gather": [0, 0],
        "all_gather_base": [3, 3],
        "gather": [2, 2],
        "scatter": [3, 3],
        "reduce_scatter(SUM)": [3, 3],
        "all_to_all": [0, 0],
        "all_to_all_single": [1, 2],
        "all_gather_cat": [3, 3],
        "reduce_scatter_dim(SUM)": [1, 2],
        "permute": [2, 2],
        "copy_to_group": [3, 3],
    }


def _asks_for_some_gradients(rank, limit):
    """``torch.autograd.grad`` follows only what leads to its inputs, which an anchor does not."""
    w, x = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=rank == 0)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=limit))
    inputs = [w, x] if rank == 0 else [w]
    found = {}
    for name, tensor, options in (
        ("connected", x if rank == 0 else dac.connect(x, w), {}),
        ("anchored", x, {"anchor": True, "group": group}),
    ):
        loss = (dac.broadcast(tensor, 0, **options) * w * (1 + rank)).sum()
        try:
            found[name] = [gradient.tolist() for gradient in torch.autograd.grad(loss, inputs)]
        except dac.CollectiveError as error:
            found[name] = str(error)
    return found


def test_a_tensor_connected_to_an_input_takes_part_where_an_anchor_cannot():
    first, second = run_ranks(_asks_for_some_gradients, 2, patience(0.5), group_timeout=30)
    assert first["connected"] == [[1, 1], [3, 3]]
    assert second["connected"] == [[2, 2]]
    assert "backward(inputs=...) follow only what leads to their inputs" in first["anchored"]
    assert "there pass connect(tensor, input)" in first["anchored"]


def test_connect_adds_nothing_from_what_it_connects():
    loss = torch.tensor(2.0, requires_grad=True)
    broken = torch.tensor([float("nan"), float("inf")], requires_grad=True)
    connected = dac.connect(loss, broken, broken + 0j)
    connected.backward()
    assert connected.item() == 2
    assert loss.grad == 1
    assert broken.grad.tolist() == [0, 0]


def _error_of(fn, *args, **kwargs):
    try:
        fn(*args, check=True, **kwargs)
    except TensorMismatchError as error:
        return str(error)
    return None


def _checked(rank):
    x = torch.ones(2 + rank)
    same = torch.ones(2)
    seen = {
        "shape": _error_of(dac.all_reduce, x),
        "dtype": _error_of(dac.all_gather, same.double() if rank else same),
        "op": _error_of(dac.all_reduce, same, "max" if rank else "sum"),
        "root": _error_of(dac.broadcast, same, rank),
        "function": _error_of(dac.all_gather if rank else dac.all_reduce, same),
        "gradient": _error_of(dac.broadcast, same.clone().requires_grad_(rank == 0), 0),
        "splits": _error_of(dac.all_to_all_single, torch.empty(2), x, [1, 1], [1 + rank, 1]),
        "dims": _error_of(dac.all_gather_cat, torch.ones(2, 2 + rank), 0, sizes="auto"),
        "fits": _error_of(dac.all_gather_cat, x, sizes="auto"),
        "anchored": _error_of(dac.broadcast, same.clone().requires_grad_(rank == 0), 0, anchor=True),
        "no_grad": _without_grad(same.clone().requires_grad_(rank == 0)),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_AUTOGRAD_CHECK", "1")
        try:
            dac.all_reduce(same, "max" if rank else "min")
        except TensorMismatchError:
            seen["environment"] = True
    # The group still works afterwards.
    seen["after"] = dac.all_reduce(same, check=True).tolist()
    return seen


def _transformed(rank):
    x, wide = torch.ones(3, 2), torch.ones(3, 2 + rank)
    sent = functools.partial(dac.all_reduce, check=True)

    def with_tangent():
        with torch.autograd.forward_ad.dual_level():
            return sent(x if rank else torch.autograd.forward_ad.make_dual(x, x))

    def splits(v):
        return (
            dac.all_to_all_single(torch.empty(2), torch.ones(2 + rank), [1, 1], [1 + rank, 1], check=True) + v
        )

    calls = {
        "batch": lambda: torch.func.vmap(sent, in_dims=1)(wide),
        "one batch": lambda: torch.func.vmap(lambda v: v + sent(v if rank else x[:, 0]), in_dims=1)(x),
        "jvp": lambda: sent(x) if rank else torch.func.jvp(sent, (x,), (x,)),
        "dual": with_tangent,
        "grad": lambda: torch.func.grad(lambda v: sent(v[: 1 + rank]).sum())(x),
        "splits": lambda: torch.func.grad(lambda v: splits(v[0]).sum())(x),
    }
    found = {}
    for name, call in calls.items():
        try:
            found[name] = call()
        except TensorMismatchError as error:
            found[name] = str(error)
    both = torch.func.vmap(torch.func.grad(lambda v: sent(v).sum()))(x)
    return found, torch.func.jvp(sent, (both,), (both,))[1].tolist()


def test_check_tells_which_transforms_do_not_fit():
    first, second = run_ranks(_transformed, 2, timeout=60, group_timeout=30)
    assert first == second
    found, tangent = first
    for name, text in {
        "batch": "a batch of 3",
        "one batch": "a batch of 2",
        "jvp": "with a tangent",
        "dual": "with a tangent",
        "grad": "shape (1, 2)",
        "splits": "rank 1 of the group sends 2 to rank 0",
    }.items():
        assert text in found[name], name
    assert tangent == [[4.0] * 2] * 3


def _without_grad(x):
    with torch.no_grad():
        return _error_of(dac.broadcast, x, 0)


def test_check_tells_every_rank_what_does_not_fit():
    first, second = run_ranks(_checked, 2)
    assert first == second
    assert "shape (2), torch.float32 on cpu" in first["shape"]
    assert "shape (3)" in first["shape"]
    assert "torch.float64" in first["dtype"]
    assert "rank 0 was called with all_reduce(SUM), sum, rank 1 with all_reduce(MAX), sum" in first["op"]
    assert "broadcast from 0" in first["root"]
    assert "all_gather" in first["function"]
    assert "needs a gradient" in first["gradient"]
    assert "needs no gradient" in first["gradient"]
    assert "rank 1 of the group sends 2 to rank 0, which expects 1" in first["splits"]
    assert "shape (any, 2)" in first["dims"]
    assert first["fits"] is first["anchored"] is first["no_grad"] is None
    assert first["environment"]
    assert first["after"] == [2, 2]


def _unchecked(rank):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIST_AUTOGRAD_CHECK", "0")
        return dac.all_reduce(torch.ones(2, requires_grad=bool(rank))).tolist()


def test_nothing_is_compared_unless_asked_for():
    # Not even that only one of them needs a gradient.
    assert run_ranks(_unchecked, 2) == [[2, 2], [2, 2]]


def _bad_alone(rank):
    """One rank's arguments are wrong, and the others would wait for it."""
    x = torch.ones(2 + rank)
    found = []
    for call in (
        lambda: dac.all_gather_base(torch.empty(4), x, check=True),
        lambda: dac.all_gather_cat(x, sizes=[2, 2], check=True),
        lambda: dac.reduce_scatter(torch.ones(2), [x, x], check=True),
        lambda: dac.all_reduce(x, "sum" if rank == 0 else "median", check=True),
    ):
        try:
            call()
        except (TensorMismatchError, TypeError, ValueError) as error:
            found.append((type(error).__name__, str(error)))
    return found, dac.all_reduce(torch.ones(1), check=True).item()


def test_check_tells_the_others_of_a_rank_that_raises():
    (first, after), (second, _) = run_ranks(_bad_alone, 2, group_timeout=30)
    assert [kind for kind, _ in first] == ["TensorMismatchError"] * 4
    assert [kind for kind, _ in second] == ["ValueError", "ValueError", "ValueError", "TypeError"]
    for (_, told), (kind, own) in zip(first, second, strict=True):
        assert told == f"rank 1 cannot go on: {kind}: {own}"
    assert after == 2


def _outlives(rank):
    """One rank ends between a forward and its backward."""
    x = torch.ones(4, requires_grad=True)
    y, handle = dac.all_gather_cat(x), dac.start(dac.all_reduce, x)
    handle.wait()
    if rank:
        stop_process()
    seen = []
    for call in (
        lambda: y.sum().backward(),
        lambda: dac.all_reduce(x),
        lambda: dac.start(dac.all_gather, x).wait(),
        lambda: dac.all_reduce(x, check=True),
    ):
        with pytest.raises(dac.CollectiveError) as caught:
            call()
        seen.append(str(caught.value))
    return seen


def test_every_call_after_a_rank_has_gone_names_its_function():
    seen, _ = run_ranks(_outlives, 2, timeout=60, group_timeout=2, may_die=[1])
    names = ("the backward of all_gather_cat failed", "all_reduce(SUM) failed", "all_gather failed")
    for text, name in zip(seen, names, strict=False):
        assert text.startswith(name)
    assert "comparison of check=True failed on rank 0 of 2 in the group of all_reduce(SUM)" in seen[-1]
