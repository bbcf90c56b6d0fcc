"""Invalid arguments on one rank: every rank is told at once, whatever the problem is."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dist_utils import (
    AgreementError,
    OrderedWorker,
    TensorMismatchError,
    require_same_terms,
    sync_module_states,
    sync_params_and_buffers,
    verify_param_shape_across_processes,
)
from dist_utils.testing import run_ranks

GROUP_TIMEOUT = 50.0
"""A timeout that no test reaches."""


class NotShown:
    def __repr__(self):
        raise KeyError("no repr")


class Failing(torch.nn.Linear):
    def named_buffers(self, *args, **kwargs):
        raise LookupError("no buffers today")


class NotShownError(LookupError):
    def __str__(self):
        raise KeyError("no text")


class FailingInSilence(torch.nn.Linear):
    def named_buffers(self, *args, **kwargs):
        raise NotShownError


def _sync(module, ignored=()):
    return lambda: sync_module_states(module, None, 100, 0, ignored)


def _compare(tensors, names=None):
    return lambda: verify_param_shape_across_processes(None, tensors, names=names)


def _terms(*args, **options):
    return lambda: require_same_terms(None, *args, **options)


LINEAR, TENSORS = torch.nn.Linear(2, 2), [torch.ones(1)]
# A correct call, and a wrong one for one rank.
CASES = {
    "module": (_sync(LINEAR), _sync(3)),
    "one name": (_sync(LINEAR), _sync(LINEAR, "weight")),
    "no names": (_sync(LINEAR), _sync(LINEAR, 3)),
    "iterator": (_sync(LINEAR), _sync(LINEAR, iter(["bias", "weight"]))),
    "failing module": (_sync(LINEAR), _sync(Failing(2, 2))),
    "no list": (
        lambda: sync_params_and_buffers(None, TENSORS, 100, 0),
        lambda: sync_params_and_buffers(None, None, 100, 0),
    ),
    "no tensors": (_compare(TENSORS), _compare(None)),
    "names": (_compare(TENSORS, ["a"]), _compare(TENSORS, 3)),
    "title": (_terms("title"), _terms(object())),
    "terms": (_terms("title"), _terms("title", [1])),
    "repr": (_terms("title", {"a": 1}), _terms("title", {"a": NotShown()})),
    "timeout": (_terms("title"), _terms("title", timeout=3)),
}


def _one_is_wrong(rank, wrong_rank):
    seen = {}
    for name, (right, wrong) in CASES.items():
        start = time.monotonic()
        try:
            seen[name] = (wrong if rank == wrong_rank else right)()
        except Exception as error:  # noqa: BLE001 - whatever it is
            seen[name] = type(error).__name__, str(error), time.monotonic() - start
        right()  # the ranks are still in step
    return seen


@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_a_problem_of_one_rank_is_raised_on_all(wrong_rank):
    found = run_ranks(_one_is_wrong, 2, wrong_rank, group_timeout=GROUP_TIMEOUT)
    for name in CASES:
        own, text, _ = found[wrong_rank][name]
        told, message, seconds = found[1 - wrong_rank][name]
        assert own in ("TypeError", "AttributeError", "LookupError", "KeyError"), name
        assert told in (AgreementError.__name__, TensorMismatchError.__name__), name
        assert f"rank {wrong_rank} cannot go on: {own}: {text}" in message
        assert seconds < GROUP_TIMEOUT


def _error_without_text(rank):
    start, module = time.monotonic(), (FailingInSilence if rank else torch.nn.Linear)(2, 2)
    with pytest.raises(NotShownError if rank else TensorMismatchError) as raised:
        sync_module_states(module, None, 100, 0, ())
    return "" if rank else str(raised.value), time.monotonic() - start


def test_an_error_without_a_text_is_reported_by_its_type():
    (text, seconds), _ = run_ranks(_error_without_text, 2, group_timeout=GROUP_TIMEOUT)
    assert text == "rank 1 cannot go on: NotShownError"
    assert seconds < GROUP_TIMEOUT


def _size_by_sum(group):
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    return ones.item()


def _failing_terms(rank):
    def terms():
        if rank == 1:
            raise ValueError("no terms")
        return {}

    worker, start = OrderedWorker(terms=terms), time.monotonic()
    with pytest.raises(RuntimeError, match="no terms"):
        worker.submit(lambda group: group.size()).wait()
    with OrderedWorker() as worker:
        again = worker.submit(_size_by_sum).wait()
    return again, type(worker.error), time.monotonic() - start


def test_terms_that_fail_on_one_rank_are_an_error_on_every_rank():
    for again, _, seconds in run_ranks(_failing_terms, 2, group_timeout=GROUP_TIMEOUT):
        assert again == 2
        assert seconds < GROUP_TIMEOUT


def _sets(rank):
    names = [f"n{number}" for number in range(20)]
    terms = {"names": set(names if rank else reversed(names)), "none": frozenset()}
    same = require_same_terms(None, "sets", terms, timeout=timedelta(seconds=30))
    with pytest.raises(AgreementError, match="names is set of 'n0', 'n1'"):
        require_same_terms(None, "sets", {"names": set(names[rank:])})
    return same


def test_sets_are_the_same_in_any_order():
    first, second = run_ranks(_sets, 2)
    assert first == second
