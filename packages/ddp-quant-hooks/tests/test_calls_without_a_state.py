"""Calls without a state: after an error on every rank, they can be made again."""

from datetime import timedelta

import pytest
import torch

from ddp_quant_hooks import all_reduce
from dist_utils import AgreementError, torch_compat
from dist_utils.testing import patience, run_ranks


def _total(rank):
    ones = torch.full((9,), 1.0 + rank)
    all_reduce(ones)
    return ones.unique().tolist()


def _unequal_first_calls(rank):
    """The agreement fails before the state's thread is made."""
    with pytest.raises(AgreementError, match=r"\(10, torch.float32"):
        all_reduce(torch.ones(9 + rank))
    return _total(rank)


def test_a_first_call_that_differs_between_ranks_does_not_end_all_calls():
    assert run_ranks(_unequal_first_calls, 2) == [[3.0]] * 2


def _late(rank, limit):
    """A rank is so late for a call that the other one has given up; both start over at the same call."""
    assert _total(rank) == [3.0]
    store = torch_compat.default_store()
    if rank:
        store.wait(["given up"], timedelta(seconds=10 * limit))
    started = all_reduce(torch.ones(9), async_op=True)
    with pytest.raises(RuntimeError):
        started.wait()
    store.set("given up", "")
    with pytest.raises(RuntimeError):  # calls after the failed one fail too, until one has raised here
        _total(rank)
    return _total(rank)


def test_a_rank_that_came_late_does_not_end_all_calls():
    limit = patience(2.0)
    assert run_ranks(_late, 2, limit, group_timeout=limit) == [[3.0]] * 2
