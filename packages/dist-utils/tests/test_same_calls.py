"""Identical calls on plain tensors on all ranks: the ranks compare them once, and not again."""

import pytest
import torch
import torch.distributed as dist

from dist_utils import AgreementError
from dist_utils.comm_hooks import require_same_call
from dist_utils.testing import run_ranks


def _steps_of_many_calls(rank, calls):
    """After the first step one rank alone may make the calls again: nobody is asked."""
    for step in range(3):
        if step == 0 or rank == 0:
            for number in range(calls):
                terms = {"key": f"layer {number}", "text": "\ud800"}
                require_same_call(None, "call", terms, [torch.ones(number)])
    dist.barrier()
    group = dist.new_group()
    with pytest.raises(AgreementError, match="key is 'a' on rank 0, 'b' on rank 1"):
        require_same_call(group, "call", {"key": "ab"[rank]})
    with pytest.raises(
        AgreementError, match=r"tensors is \[\(1, torch.float32, 'cpu'\)\] on rank 0, \[\(2, "
    ):
        require_same_call(None, "call", {}, [torch.ones(1 + rank)])


@pytest.mark.parametrize("calls", [30, pytest.param(1100, marks=pytest.mark.exhaustive)])
def test_a_repeated_step_of_many_calls_compares_nothing(calls):
    run_ranks(_steps_of_many_calls, 2, calls)
