"""``compare_calls``: what is wrong on one rank, or differs between ranks, is an error on every rank."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

import dist_autograd_collectives as dac
from dist_autograd_collectives import participation
from dist_utils import TensorMismatchError
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
}
BAD = [
    ("scatter", (LIST, 1), {}),
    ("scatter", (LIST, 0), {"like": "text"}),
    ("all_to_all", ([torch.zeros(2), torch.zeros(3)], [torch.zeros(3), torch.zeros(2)]), {}),
    ("all_to_all_single", (torch.zeros(4, 2), X, [3, 1], [2, 2]), {}),
    ("all_to_all_dim", (X.reshape(2, 4), 0, 1), {}),  # parts with the same number of elements
    ("all_to_all_dim", (X, 0, 1), {"input_sizes": [1, 3]}),
    ("all_to_all_dim", (X, 0, 1), {"output_sizes": "auto"}),
    ("all_reduce", (X,), {"grad": "replicated"}),
    ("all_reduce", (), {}),
    ("all_reduce", (X,), {"nothing": 1}),
    ("all_reduce", (X,), {"group": "text"}),  # the other waits in WORLD, which may have been meant
    ("all_reduce_coalesced", (LIST[:1],), {}),
    *((name, ("text", *good[1:]), {}) for name, good in GOOD.items()),
]


def checked(function):
    """The function, whose calls are compared."""

    def run(*args, **kwargs):
        with dac.compare_calls():
            return function(*args, **kwargs)

    return run


def _outcome(fn, *args, **kwargs):
    try:
        checked(fn)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return type(error).__name__, str(error)
    return "no error", ""


def _one_is_wrong(rank):
    """One rank after another is wrong; the group still works afterwards."""
    return {
        (name, str(args), str(options), wrong_rank): (
            _outcome(
                getattr(dac, name),
                *(args if rank == wrong_rank else GOOD[name]),
                **(options if rank == wrong_rank else {}),
            ),
            _outcome(getattr(dac, name), *GOOD[name])[0],
        )
        for (name, args, options), wrong_rank in itertools.product(BAD, (0, 1))
    }


def test_an_error_of_one_rank_is_told_to_every_rank_and_the_group_stays_usable():
    found = run_ranks(_one_is_wrong, 2, group_timeout=30)
    for case in found[0]:
        wrong_rank = case[-1]
        (own, text), after = found[wrong_rank][case]
        told, told_after = found[1 - wrong_rank][case]
        assert (after, told_after) == ("no error", "no error"), case
        if own in {"TypeError", "ValueError"}:  # this rank cannot even compare
            assert told == ("TensorMismatchError", f"rank {wrong_rank} cannot go on: {own}: {text}"), case
        else:
            assert (own, told[0]) == ("TensorMismatchError", "TensorMismatchError"), (case, text)


def _needs(*ranks):
    """A tensor that needs a gradient only on these ranks."""
    return torch.ones(2, requires_grad=dist.get_rank() in ranks)


def _of(first, second):
    return second if dist.get_rank() else first


def _length():
    return torch.ones(2 + dist.get_rank())


checked_sum = checked(dac.all_reduce)


def _dual():
    x = torch.ones(3, 2)
    with torch.autograd.forward_ad.dual_level():
        return checked_sum(_of(torch.autograd.forward_ad.make_dual(x, x), x))


def _splits(length):
    """Rank 1 sends more to rank 0 than that one expects, inside a transform."""
    sent = [1 + dist.get_rank(), 1]
    exchange = functools.partial(dac.all_to_all_single, output_split_sizes=[1, 1], input_split_sizes=sent)
    return torch.func.grad(lambda v: (checked(exchange)(torch.empty(2), torch.ones(sum(sent))) + v[0]).sum())(
        torch.ones(length)
    )


# Each with what every rank is told.
DIFFERENT = [
    ("rank 0 .* shape .2., torch.float32 on cpu.* rank 1 .* shape .3.", lambda: checked_sum(_length())),
    ("torch.float64", lambda: checked(dac.all_gather)(_of(X, X.double()))),
    (
        r"rank 0 was called with all_reduce\(SUM\), sum, rank 1 with all_reduce\(MAX\), sum",
        lambda: checked_sum(X, _of("sum", "max")),
    ),
    ("broadcast from 0", lambda: checked(dac.broadcast)(X, dist.get_rank())),
    ("all_gather", lambda: checked(_of(dac.all_reduce, dac.all_gather))(X)),
    ("which needs a gradient.* which needs no gradient", lambda: checked(dac.broadcast)(_needs(0), 0)),
    (
        "needs a gradient.* needs no gradient",
        lambda: checked(dac.scatter)(_of([X[0], _needs(0)], None), 0, like=X[0]),
    ),
    ("rank 1 of the group sends 2 to rank 0, which expects 1", lambda: _splits(2)),
    (r"shape \(any, 2\)", lambda: checked(dac.all_gather_cat)(torch.ones(2, _of(2, 3)), sizes="auto")),
    ("a batch of 3", lambda: torch.func.vmap(checked_sum, in_dims=1)(torch.ones(3, _of(2, 3)))),
    (
        "with a tangent",
        lambda: torch.func.jvp(checked_sum, (X,), (X,)) if dist.get_rank() else checked_sum(X),
    ),
    ("with a tangent", _dual),
    (r"shape \(1\)", lambda: torch.func.grad(lambda v: checked_sum(v[: _of(1, 2)]).sum())(torch.ones(3))),
]


def _told(rank):
    seen = []
    for text, call in DIFFERENT:
        with pytest.raises(TensorMismatchError, match=f"(?s){text}") as caught:
            call()
        seen.append(str(caught.value))
    fits = [
        checked(dac.all_gather_cat)(_length(), sizes="auto").tolist(),
        checked(dac.broadcast)(dac.anchored(_needs(0)), 0).tolist(),
        torch.func.vmap(torch.func.grad(lambda v: checked_sum(v).sum()))(torch.ones(3, 2)).tolist(),
    ]
    with torch.no_grad():
        fits.append(checked(dac.broadcast)(_needs(0), 0).tolist())
    return seen, fits


def test_every_rank_is_told_what_differs_and_calls_that_fit_run():
    (told, fits), (told_second, fits_second) = run_ranks(_told, 2, timeout=60, group_timeout=30)
    assert told == told_second
    assert fits == fits_second == [[1.0] * 5, [1, 1], [[2.0] * 2] * 3, [1, 1]]


def _needs_differ():
    """Whether a call is compared: one whose tensor needs a gradient on one rank only."""
    try:
        dac.all_reduce(_needs(0))
    except TensorMismatchError as error:
        return "needs no gradient" in str(error)
    return False


def _switched(_):
    found = [_needs_differ()]
    with dac.compare_calls():
        found.append(_needs_differ())
        with dac.compare_calls(False):
            found.append(_needs_differ())
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(_needs_differ).result())  # in another thread
    return [*found, _needs_differ()]


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_environment_asks_for_comparison_and_a_context_does(value, monkeypatch):
    monkeypatch.setenv("DIST_AUTOGRAD_CHECK", value)
    usual = value == "1"
    assert run_ranks(_switched, 2) == [[usual, True, False, usual, usual]] * 2


def _wrong_while_recorded(rank):
    """Rank 0 cannot begin a call of which make_fx makes a graph; the next call of both is compared."""
    with dac.compare_calls():
        if rank == 0:
            with pytest.raises(IndexError):
                make_fx(lambda x: dac.all_gather_cat(x, 3))(X)
        return dac.all_reduce(torch.ones(1)).item()


def test_an_error_while_calls_are_recorded_is_not_told():
    assert run_ranks(_wrong_while_recorded, 2, group_timeout=30) == [2.0] * 2


def _leave(*_):
    raise TensorMismatchError("this rank leaves")


def _left_alone(rank):
    """Rank 1 leaves between the comparison of calls and that of their splits."""
    if rank == 1:
        participation.all_gather_plain = _leave
    with pytest.raises(RuntimeError) as caught:
        checked(dac.all_to_all_single)(torch.empty(2), torch.ones(2), [1, 1], [1, 1])
    return type(caught.value), str(caught.value)


def test_a_comparison_of_splits_that_fails_is_a_collective_error():
    (kind, text), (left, _) = run_ranks(_left_alone, 2, group_timeout=patience(3.0))
    assert (kind, left) == (dac.CollectiveError, TensorMismatchError)
    assert "the comparison of calls failed on rank 0 of 2 in the group of all_to_all_single" in text
