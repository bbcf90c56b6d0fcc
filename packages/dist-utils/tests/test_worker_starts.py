"""How a worker starts: ranks agree first, a failed start prevents no later one, threads may race."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dist_utils import AgreementError, OrderedWorker
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL, default_store


def _sum(group):
    value = torch.ones(1)
    dist.all_reduce(value, group=group)
    return value.item()


def _error_of(future):
    with pytest.raises(RuntimeError) as caught:
        future.wait()
    return str(caught.value)


def _different_terms(rank):
    """Nothing runs, every rank hears why, and new workers with equal terms start."""
    ran = []
    worker = OrderedWorker(name="hook", terms=lambda: {"bits": 8 if rank else 4})
    messages = [_error_of(worker.submit(ran.append)) for _ in range(2)]
    kind = type(worker.error)
    worker.close()
    with OrderedWorker(name="hook", terms=lambda: {"bits": 8}) as again:
        return ran, messages, kind, again.submit(_sum).wait()


@pytest.mark.parametrize("world_size", [2, 3])
def test_workers_with_different_terms_start_on_no_rank(world_size):
    others = "rank 1" if world_size == 2 else "ranks 1, 2"
    for ran, messages, kind, total in run_ranks(_different_terms, world_size):
        assert ran == []
        assert kind is AgreementError
        for message in messages:
            assert (
                f"AgreementError: hook differs between ranks: bits is 4 on rank 0, 8 on {others}" in message
            )
        assert total == world_size


def _missing_rank(rank, late, limit):
    """One rank does not submit the first job; then all start again, as after an error."""
    message = ""
    if rank != late:
        worker = OrderedWorker(name="hook")
        start = time.monotonic()
        message = _error_of(worker.submit(_sum))
        assert time.monotonic() - start < 7 * limit
        worker.close()
    store = default_store()  # not a barrier, which has the group's timeout
    if rank != late:
        store.set(f"failed on {rank}", "")
    store.wait([f"failed on {other}" for other in range(3) if other != late], timedelta(seconds=10 * limit))
    totals = []
    for _ in range(2):
        with OrderedWorker(name="hook") as again:
            totals.append(again.submit(_sum).wait())
    return message, totals


@pytest.mark.parametrize("late", [0, 1])
def test_a_failed_start_does_not_affect_the_next_one(late):
    limit = patience(3.0)
    found = run_ranks(_missing_rank, 3, late, limit, group_timeout=limit)
    came = [rank for rank in range(3) if rank != late]
    for rank, (message, totals) in enumerate(found):
        assert totals == [3.0, 3.0]
        if rank != late:
            assert f"hook: ranks {came} came within {limit:g} s, ranks [{late}] did not" in message


def _first_jobs_at_once(rank):
    """Several threads submit the first job of one worker at the same time: one private group."""
    with OrderedWorker() as worker:
        gate, totals = threading.Barrier(4), []

        def submit():
            gate.wait()
            totals.append(worker.submit(_sum).wait())

        threads = [threading.Thread(target=submit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return totals


def test_threads_may_submit_the_first_job_at_once():
    assert run_ranks(_first_jobs_at_once, 2) == [[2.0] * 4] * 2


def _waits(rank):
    """wait() returns after all jobs so far, failed or not, even on a closed worker."""
    done = []

    def slow(group):
        time.sleep(0.3)
        done.append(_sum(group))

    worker = OrderedWorker()
    worker.wait()
    worker.submit(slow)
    worker.submit(slow)
    worker.wait()
    seen = [len(done)]
    worker.submit(lambda group: 1 / 0)
    worker.wait()
    seen.append(type(worker.error).__name__)
    worker.close()
    worker.wait()
    return seen


def test_waiting_for_the_jobs_so_far():
    assert run_ranks(_waits, 2) == [[2, "ZeroDivisionError"]] * 2


def _two_threads_cross(rank):
    """Each thread has a group of its own; the threads start in a different order on each rank."""
    groups, totals = [dist.new_group([0, 1]) for _ in range(2)], {}

    def work(index):
        if index == rank:
            time.sleep(1)
        with OrderedWorker(groups[index]) as worker:
            totals[index] = worker.submit(_sum).wait()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return totals


@pytest.mark.skipif(not hasattr(dist.Store, "clone"), reason="threads share one connection to the store")
def test_threads_on_groups_of_their_own_do_not_wait_for_each_other():
    assert run_ranks(_two_threads_cross, 2, group_timeout=patience(10.0)) == [{0: 2.0, 1: 2.0}] * 2


def _stopped_starts(rank):
    """A signal stops one rank's start, and all workers are closed while they start: nothing is left."""
    groups, threads = len(_groups()), threading.active_count()

    def interrupt():
        raise KeyboardInterrupt

    worker = OrderedWorker(name="hook", terms=interrupt if rank == 0 else dict)
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            worker.submit(_sum)
    found = [_error_of(worker.submit(_sum)) for _ in range(2)]
    worker.close()

    def close():
        worker.close()
        return {}

    worker = OrderedWorker(name="hook", terms=close)
    with pytest.raises(RuntimeError, match="hook is closed"):
        worker.submit(_sum)
    deadline = time.monotonic() + patience(10.0)
    while threading.active_count() > threads or (GROUPS_END_WITHOUT_GIL and len(_groups()) > groups):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def _groups():
    return dist.distributed_c10d._world.pg_map


def test_a_start_that_is_interrupted_or_closed_leaves_nothing():
    for found in run_ranks(_stopped_starts, 2, group_timeout=patience(10.0)):
        assert all("KeyboardInterrupt" in text for text in found)
