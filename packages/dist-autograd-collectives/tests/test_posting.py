"""Messages are handed over by a thread that belongs to the caller's, and leaves nothing behind."""

import gc
import os
import threading
import time
import warnings
import weakref

import pytest
import torch

import dist_autograd_collectives as dac
from dist_autograd_collectives.posting import Posting, hand_over
from dist_utils.testing import patience, run_ranks


def _helpers():
    return [thread for thread in threading.enumerate() if thread.name == "dac-messages"]


def _on_short_lived_threads(rank):
    x = torch.full((4,), rank + 1.0, requires_grad=True)
    dac.all_to_all_single(torch.empty(4), x)
    mine, most = len(_helpers()), 0
    totals = []

    def call():
        nonlocal most
        totals.append(dac.all_reduce(x).detach())
        most = max(most, len(_helpers()))

    for _ in range(3):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    deadline = time.monotonic() + patience(10)
    while len(_helpers()) > mine and time.monotonic() < deadline:
        time.sleep(0.01)
    return mine, most, len(_helpers()), totals


def test_each_calling_thread_has_one_helper_which_ends_with_it():
    for mine, most, left, totals in run_ranks(_on_short_lived_threads, 2):
        assert (mine, left) == (1, 1)
        assert most >= 2
        assert all(torch.equal(total, torch.full((4,), 3.0)) for total in totals)


def test_what_goes_wrong_is_raised_where_the_messages_are_waited_for():
    def refuse():
        raise ValueError("no such rank")

    posting = Posting(refuse)
    with pytest.raises(ValueError, match="no such rank"):
        posting.works()
    assert Posting(list).works() == []  # the thread goes on


def test_all_is_handed_over_when_a_start_returns():
    handed = []

    def slow(number):
        time.sleep(0.05)
        handed.append(number)
        return []

    postings = [Posting(lambda number=number: slow(number)) for number in range(3)]
    hand_over()
    assert handed == [0, 1, 2]
    assert [posting.works() for posting in postings] == [[], [], []]


def test_the_helper_holds_no_tensor_that_was_handed_over():
    def posting_of(tensor):
        def post():
            assert len(tensor) == 4
            return []

        return Posting(post), weakref.ref(tensor)

    posting, alive = posting_of(torch.zeros(4))
    posting.done()
    gc.collect()
    assert alive() is None  # or a gradient would be copied where it could be taken
    assert posting.works() == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_a_helper_of_its_own():
    assert Posting(list).works() == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that other threads run
        child = os.fork()
    if child == 0:
        os._exit(0 if Posting(list).works() == [] else 1)
    deadline = time.monotonic() + patience(10)
    done, status = os.waitpid(child, os.WNOHANG)
    while not done and time.monotonic() < deadline:
        time.sleep(0.01)
        done, status = os.waitpid(child, os.WNOHANG)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == child
    assert os.waitstatus_to_exitcode(status) == 0
