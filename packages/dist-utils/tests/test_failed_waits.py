"""A backward pass does not wait a second time for ranks that did not come; the next one is a new attempt."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from dist_utils import AgreementError, OrderedWorker, require_same_terms
from dist_utils.testing import call_in_backward, patience, run_ranks

ABSENT = 2
GROUP_TIMEOUT = 60.0
LONG = 30.0
"""Much less than the timeout of a group, and much more than anything takes that does not wait for it."""


def _backward(*calls):
    """Make calls in one backward pass; return what each one gave or raised, and how long it took."""
    seen = []

    def every_call():
        for call in calls:
            began = time.monotonic()
            try:
                result = call()
            except RuntimeError as error:
                result = f"{type(error).__name__}: {error}"
            seen.append((result, time.monotonic() - began))

    call_in_backward(torch.ones(1, requires_grad=True), every_call).backward()
    return seen


def _sum(group):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def _wait_in_store(rank, limit):
    """A rank does not come to the first agreement of a pass. The others still ask for two groups with it."""
    last = dist.new_group([1, 2])
    seen = []
    if rank != ABSENT:
        worker = OrderedWorker(name="worker") if rank == 0 else OrderedWorker(last, name="worker")
        seen = _backward(
            lambda: require_same_terms(None, "first", timeout=timedelta(seconds=limit)),
            lambda: require_same_terms(None, "again"),
            lambda: worker.submit(_sum).wait(),
        )
        worker.close()
    dist.barrier()
    with OrderedWorker(name="new") as new:
        after = _backward(lambda: require_same_terms(None, "after"), lambda: new.submit(_sum).wait())
    return seen, [result for result, _ in after]


def test_a_pass_waits_for_a_rank_in_one_agreement():
    limit = patience(0.5)
    *both, (_, last) = run_ranks(_wait_in_store, 3, limit, group_timeout=GROUP_TIMEOUT)
    first = f"first: ranks [0, 1] came within {limit:g} s, ranks [2] did not"
    for seen, after in both:
        assert seen[0][0].startswith(f"AgreementError: {first}")
        for (result, seconds), title in zip(seen[1:], ("again", "worker"), strict=True):
            assert title in result
            assert first in result
            assert seconds < LONG
        assert after == last
        assert after[1] == 3.0


def _meet_others(rank, limit):
    """A rank does not come to some. One of them meets in another group with a rank that knows nothing of it.

    That one would wait until the timeout, and would take the other's next pass for this one.
    """
    some, pair = dist.new_group([0, ABSENT]), dist.new_group([0, 1])
    seen = []
    if rank != ABSENT:
        worker = OrderedWorker(pair, name="worker")
        calls = [lambda: require_same_terms(pair, "pair"), lambda: worker.submit(_sum).wait()]
        if rank == 0:
            calls.insert(0, lambda: require_same_terms(some, "some", timeout=timedelta(seconds=limit)))
        seen = _backward(*calls)
        worker.close()
    dist.barrier()
    return [result for result, _ in seen]


def test_groups_without_a_missing_rank_meet_as_always():
    (first, *ours), theirs, _ = run_ranks(_meet_others, 3, patience(0.5), group_timeout=GROUP_TIMEOUT)
    assert "some: ranks [0] came" in first
    assert ours == theirs
    assert "Error" not in ours[0]
    assert ours[1] == 2.0


def _wait_in_threads(rank, limit):
    """Several backward passes at a time wait for a rank, each for itself."""
    groups = [dist.new_group() for _ in range(3)]
    meet = threading.Barrier(len(groups))

    def call(group):
        def meet_and_ask():
            meet.wait()
            return require_same_terms(group, "again")

        first = partial(require_same_terms, group, "first", timeout=timedelta(seconds=limit))
        return _backward(first, meet_and_ask)[1]

    with ThreadPoolExecutor(len(groups)) as threads:
        seen = [*threads.map(call, groups)] if rank == 0 else []
    dist.barrier()
    return seen


def test_passes_in_several_threads_wait_once_each():
    seen, _ = run_ranks(_wait_in_threads, 2, patience(0.5), group_timeout=GROUP_TIMEOUT)
    for result, seconds in seen:
        assert result.startswith("AgreementError: again: ranks are not waited for again")
        assert seconds < LONG


def _wait_for_connection(rank, limit):
    """A rank does not come to connect a worker's private group."""
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=limit))
    worker = OrderedWorker(group, name="worker")
    worker.agree()
    seen = []
    if rank != ABSENT:
        seen = _backward(
            lambda: worker.submit(_sum).wait(),
            lambda: require_same_terms(None, "later"),
        )
    worker.close()
    dist.barrier()
    return seen, require_same_terms(None, "after")


def test_a_pass_waits_for_a_rank_in_one_connection():
    *both, (_, name) = run_ranks(_wait_for_connection, 3, patience(1.0), group_timeout=GROUP_TIMEOUT)
    for seen, after in both:
        (first, _), (later, seconds) = seen
        assert "Error" in first
        assert later.startswith("AgreementError: later: ranks are not waited for again in this backward pass")
        assert "worker: " in later
        assert seconds < LONG
        assert after == name


def _ask_after_difference(rank):
    """Ranks that differ have all come, and may ask something else in the same pass."""
    (first, _), (second, _) = _backward(
        lambda: require_same_terms(None, "hook", {"bits": rank}), lambda: require_same_terms(None, "hook")
    )
    return first, second


def test_a_difference_is_no_wait():
    (first, name), (other, same) = run_ranks(_ask_after_difference, 2)
    assert "bits is 0 on rank 0, 1 on rank 1" in first
    assert first == other
    assert "Error" not in name
    assert name == same


def _wait_outside(rank, limit):
    """Outside of backward passes each call is an attempt of its own."""
    seconds = []
    for _ in range(2 if rank else 0):
        began = time.monotonic()
        with pytest.raises(AgreementError, match=r"ranks \[0\] did not"):
            require_same_terms(None, "hook", timeout=timedelta(seconds=limit))
        seconds.append(time.monotonic() - began)
    dist.barrier()
    return seconds


def test_outside_of_a_pass_each_call_waits():
    limit = patience(0.5)
    _, seconds = run_ranks(_wait_outside, 2, limit, group_timeout=GROUP_TIMEOUT)
    assert min(seconds) >= limit
