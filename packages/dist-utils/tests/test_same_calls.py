"""Identical calls on plain tensors on all ranks: the ranks compare them once, and not again."""

import gc
import itertools
import weakref

import pytest
import torch.distributed as dist

from dist_utils import AgreementError
from dist_utils.comm_hooks import require_same_call
from dist_utils.testing import run_ranks
from dist_utils.torch_compat import default_store


def _keys_in_store():
    """Return the number of keys when all ranks are here: comparisons go through the store."""
    dist.barrier()
    keys = default_store().num_keys()
    dist.barrier()
    return keys


def _steps_of_many_calls(rank, calls):
    counts = [_keys_in_store()]
    for _ in range(3):
        for number in range(calls):
            require_same_call(None, "call", {"key": f"layer {number}", "tensors": [(number, "\ud800")]})
        counts.append(_keys_in_store())
    with pytest.raises(AgreementError, match="key is 'a' on rank 0, 'b' on rank 1"):
        require_same_call(None, "call", {"key": "ab"[rank]})
    assert counts[1] >= counts[0] + calls
    return counts[3] - counts[1]


@pytest.mark.parametrize("calls", [30, pytest.param(1100, marks=pytest.mark.exhaustive)])
def test_a_repeated_step_of_many_calls_compares_nothing(calls):
    assert run_ranks(_steps_of_many_calls, 2, calls) == [0, 0]


class _Owner:
    """Makes calls; its calls can be told from those of others by its number."""


def _calls_of_owners(rank):
    counts = [_keys_in_store()]
    for number in range(3):
        owner = _Owner()
        for _ in range(2):
            require_same_call(None, "call", {"owner": number}, owner=owner)
        counts.append(_keys_in_store())
        left = weakref.ref(owner)
        del owner
        gc.collect()
        assert left() is None
    return [after > before for before, after in itertools.pairwise(counts)]


def test_calls_are_remembered_as_long_as_their_owner_exists():
    assert run_ranks(_calls_of_owners, 2) == [[True, True, True]] * 2
