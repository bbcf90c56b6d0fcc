"""Helpers for tests: bitwise equality on one rank and on all ranks, and a call in the middle of backward."""

import pytest
import torch
import torch.distributed as dist

from dist_utils.testing import call_in_backward, run_ranks, same_bits, same_on_all_ranks

NAN = float("nan")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor([NAN, -0.0]), torch.tensor([NAN, -0.0])),
        (torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous()),
        (torch.empty(0, 3), torch.empty(0, 3)),
        (torch.tensor(1 + 2j), torch.tensor(1 - 2j).conj()),
        ({"a": [torch.ones(1), 2, "b"]}, {"a": [torch.ones(1), 2, "b"]}),
        (NAN, NAN),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse()),
    ],
)
def test_same_bits(left, right):
    assert same_bits(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(1), 0.0),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], [1, 2]),
        (torch.eye(2).to_sparse(), torch.eye(2)),
    ],
)
def test_other_bits(left, right):
    assert not same_bits(left, right)
    assert not same_bits(right, left)


def _compare(rank):
    pair = dist.new_group([1, 2])
    same = {"weight": torch.tensor([NAN, 1.0]), "step": 3, "empty": torch.empty(0)}
    found = {
        "same": same_on_all_ranks(same),
        "one bit": same_on_all_ranks([torch.tensor([0.0 if rank < 2 else -0.0])]),
        "another shape": same_on_all_ranks(torch.zeros(3 if rank else 4)),
        "another number": same_on_all_ranks({"step": rank}),
        "none at all": same_on_all_ranks([]),
    }
    if rank:
        found["in a group"] = same_on_all_ranks(torch.tensor(min(rank, 1)), pair)
    return found


def test_same_on_all_ranks():
    expected = {
        "same": True,
        "one bit": False,
        "another shape": False,
        "another number": False,
        "none at all": True,
    }
    assert run_ranks(_compare, 3) == [expected, *[expected | {"in a group": True}] * 2]


def test_call_in_backward():
    order = []
    x = torch.ones(2, requires_grad=True)
    y = call_in_backward(x * 2, lambda: order.append("called"))
    assert order == []
    (y.sum() * 3).backward()
    assert order == ["called"]
    assert torch.equal(x.grad, torch.full((2,), 6.0))

    (gradient,) = torch.autograd.grad(call_in_backward(x, lambda: False).sum(), x)  # its result is not used
    assert torch.equal(gradient, torch.ones(2))

    def fail():
        raise ArithmeticError("the user's own error")

    with pytest.raises(ArithmeticError, match="own error"):
        call_in_backward(x, fail).sum().backward()


def _compares_a_generator(rank):
    with pytest.raises(TypeError, match="a generator cannot be compared: give a list"):
        same_on_all_ranks(torch.nn.Linear(1, 1).parameters())


def test_what_has_no_telling_text_is_not_compared():
    run_ranks(_compares_a_generator, 1)
