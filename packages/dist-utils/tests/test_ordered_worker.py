"""Jobs of several collectives: in order, concurrent with the caller, an error on every rank if one fails."""

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils import OrderedWorker
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL, default_store


def _threads(name="OrderedWorker"):
    return [thread for thread in threading.enumerate() if thread.name == name]


def _wait_for_end_of_threads(name="OrderedWorker"):
    deadline = time.monotonic() + 40
    while _threads(name) and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(_threads(name))


def _many_jobs(rank, jobs):
    """Two dependent collectives a job while the caller uses the default group: results and their order."""
    random.seed(rank)
    order = []
    with OrderedWorker() as worker:

        def job(group, index):
            value = torch.tensor([float(index + rank)])
            dist.all_reduce(value, group=group)
            time.sleep(random.random() / 1000)  # skew
            dist.all_reduce(value, group=group)
            order.append(index)
            return value.item()

        futures = []
        for index in range(jobs):
            futures.append(worker.submit(lambda group, index=index: job(group, index)))
            dist.all_reduce(torch.ones(1))
        results = [future.wait() for future in futures]
    return results, order, _wait_for_end_of_threads()


def test_jobs_run_in_order_beside_the_callers_own_collectives():
    for results, order, left in run_ranks(_many_jobs, 3, 60):
        assert results == [3.0 * (3 * index + 3) for index in range(60)]
        assert order == list(range(60))
        assert left == 0


def _ends(rank):
    """The thread ends when the worker is garbage collected, on close, and on destroy_process_group."""
    seen = {}

    def double(group):
        dist.all_reduce(torch.ones(1), group=group)
        return threading.current_thread().name

    def submit_job_that_knows(worker):
        worker.submit(lambda group: (double(group), worker)[0]).wait()

    unused = OrderedWorker(name="unused")
    seen["unused"] = len(_threads("unused"))
    unused.close()

    garbage = OrderedWorker(name="garbage")
    seen["name"] = garbage.submit(double).wait()
    submit_job_that_knows(garbage)
    del garbage
    gc.collect()
    seen["garbage"] = _wait_for_end_of_threads("garbage")

    closed = OrderedWorker(name="closed")
    pending = closed.submit(double)
    closed.close()
    closed.close()
    seen["closed"] = (pending.wait(), len(_threads("closed")))
    with pytest.raises(RuntimeError, match="closed is closed"):
        closed.submit(double)

    destroyed = OrderedWorker(name="destroyed")
    destroyed.submit(double).wait()
    dist.barrier()
    time.sleep(0.2)  # torch 2.6 can deadlock if its threads are still busy (torch_compat)
    dist.destroy_process_group()
    gc.collect()
    seen["destroyed"] = _wait_for_end_of_threads("destroyed")
    with pytest.raises(RuntimeError, match="process group of destroyed was destroyed"):
        destroyed.submit(double).wait()
    return seen


def test_no_thread_outlives_its_worker_or_the_process_group():
    for seen in run_ranks(_ends, 2):
        assert seen == {"unused": 0, "name": "garbage", "garbage": 0, "closed": ("closed", 0), "destroyed": 0}


def _unequal_ranks(rank):
    """Workers made and dropped in turn, on ranks with different numbers of groups."""
    dist.new_group([0, 2])  # ranks 0 and 2 now have one more than rank 1
    pair = dist.new_group([0, 1])
    if rank == 2:
        return None
    totals = []
    for _ in range(20):
        with OrderedWorker(pair) as worker:
            one = torch.ones(1)
            worker.submit(lambda group, one=one: dist.all_reduce(one, group=group)).wait()
            totals.append(one.item())
    return totals


def test_workers_come_and_go_on_ranks_with_different_numbers_of_groups():
    assert run_ranks(_unequal_ranks, 3) == [[2.0] * 20, [2.0] * 20, None]


def _one_rank_fails(rank):
    """Rank 1's second job raises before it communicates; its peer waits in the collective."""
    worker = OrderedWorker()
    ran = []

    def job(group, index):
        ran.append(index)
        if rank == 1 and index == 1:
            time.sleep(1.0)  # Gloo may miss a connection that closes just as a wait on it starts
            raise ValueError("bad bucket 1")
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        return value.item()

    start = time.monotonic()
    futures = [worker.submit(lambda group, index=index: job(group, index)) for index in range(4)]
    errors = []
    for future in futures:
        try:
            errors.append(future.wait())
        except RuntimeError as error:
            errors.append(str(error))
    seconds = time.monotonic() - start
    with pytest.raises(RuntimeError):
        worker.submit(lambda group: job(group, 4)).wait()
    return errors, ran, type(worker.error).__name__, seconds


def test_the_first_error_is_given_to_every_later_job_and_ends_the_peers_wait():
    (peer, peer_ran, _, peer_seconds), (failed, failed_ran, kind, _) = run_ranks(
        _one_rank_fails, 2, group_timeout=40.0 if GROUPS_END_WITHOUT_GIL else 5.0
    )
    assert failed[0] == peer[0] == 2.0
    assert all("ValueError: bad bucket 1" in message for message in failed[1:])
    assert kind == "ValueError"
    assert failed_ran == peer_ran == [0, 1], "no job runs after the first error"
    assert all(isinstance(message, str) for message in peer[1:])
    if GROUPS_END_WITHOUT_GIL:  # else at its timeout, as the failed rank waits for it before it ends
        assert peer_seconds < 20, "the peer hears of it long before its timeout"


def _raise(group):
    time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
    raise ValueError("before anything is sent")


def _fail_in_comprehension(group):
    return [_raise(group) for _ in range(1)]


def _fail_in_generator(group):
    return list(_raise(group) for _ in range(1))  # noqa: C400 - that is the point


def _fail_in_inner_function(group):
    def inner():
        _raise(group)

    inner()


def _fail_from_another_error(group):
    try:
        _fail_in_inner_function(group)
    except ValueError as error:
        raise RuntimeError("another one") from error


def _fails_somewhere(rank):
    """Rank 1's job fails in a function that holds the group, while its peer waits in a collective."""
    seconds = []
    for fails in (
        _fail_in_comprehension,
        _fail_in_generator,
        _fail_in_inner_function,
        _fail_from_another_error,
    ):
        worker = OrderedWorker()
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            worker.submit(fails if rank == 1 else dist.barrier).wait()
        seconds.append(time.monotonic() - began)
        if rank == 1:
            shown = "".join(traceback.format_exception(worker.error))
            assert "in _fail" in shown, "the error tells where it was raised"
    return seconds


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_wherever_a_job_fails_the_peers_hear_of_it():
    for seconds in run_ranks(_fails_somewhere, 2, group_timeout=40.0, timeout=120):
        assert max(seconds) < 20


def _raised_again(rank):
    """Raise a job's error again, in a caller and in another job, in frames that hold the worker."""
    freed = []
    for _ in range(2):
        worker, own = OrderedWorker(), ValueError("no job today")

        def fail(group, error=own):
            raise error

        def again(worker, error):
            with pytest.raises(ValueError, match="no job today"):
                raise worker.error
            with pytest.raises(ValueError, match="no job today"):
                raise error

        with pytest.raises(RuntimeError, match="no job today"):
            worker.submit(fail).wait()
        assert worker.error is worker.error
        again(worker, own)
        worker.wait()  # the thread releases the job a moment after its future is complete
        alive = weakref.ref(worker)
        del worker, own, fail
        gc.collect()
        freed.append(alive() is None)
    return freed


def test_errors_that_are_raised_again_keep_no_worker():
    assert run_ranks(_raised_again, 2) == [[True, True]] * 2


class _StubbornError(Exception):
    """All its methods fail."""

    def __reduce__(self):
        raise SystemExit(3)

    def __str__(self):
        raise KeyboardInterrupt

    __repr__ = __setattr__ = __bool__ = __str__


def _stubborn(rank):
    worker = OrderedWorker()

    def fail(group):
        if rank == 0:
            raise _StubbornError
        dist.all_reduce(torch.zeros(1), group=group)

    with pytest.raises(RuntimeError) as caught:
        worker.submit(fail).wait()
    worker.wait()
    return "_StubbornError" in str(caught.value), worker.error is not None


def test_an_error_whose_methods_fail_is_an_error_of_every_rank():
    assert run_ranks(_stubborn, 2, group_timeout=20) == [(True, True), (False, True)]


def _exits(rank):
    worker = OrderedWorker()
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            worker.submit(lambda group: sys.exit(4)).wait()
        messages.append(str(caught.value))
    return messages


def test_a_job_that_exits_is_an_error_and_no_hang():
    assert all("SystemExit(4)" in message for message in run_ranks(_exits, 1)[0])


def _peer_dies(rank):
    worker = OrderedWorker()

    def job(group):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        if rank == 1:
            os._exit(1)
        dist.all_reduce(value, group=group)

    start = time.monotonic()
    with pytest.raises(RuntimeError):
        worker.submit(job).wait()
    return time.monotonic() - start


def test_a_peer_that_dies_raises_on_the_others():
    seconds, died, other = run_ranks(_peer_dies, 3, may_die={1}, group_timeout=20.0)
    assert died is None
    assert seconds < 30
    assert other < 30


def _peer_is_silent(rank, limit):
    """Rank 1 never submits its job: rank 0 must get an error within the group's own timeout."""
    worker = OrderedWorker()
    worker.submit(lambda group: dist.barrier(group=group)).wait()
    if rank == 1:
        default_store().wait(["given up"], timedelta(seconds=10 * limit))
        return None
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        worker.submit(lambda group: dist.all_reduce(torch.ones(1), group=group)).wait()
    default_store().set("given up", "")
    return time.monotonic() - start


def test_the_private_group_keeps_the_timeout_of_the_group():
    limit = patience(2.0)
    seconds, _ = run_ranks(_peer_is_silent, 2, limit, group_timeout=limit)
    assert 0.6 * limit < seconds < 5 * limit


def _first_jobs_fail(rank, ranks, workers):
    """Rank 1 learns last that it is connected: a rank without a worker keeps busy the core that all share."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    if rank >= ranks:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            pass
        return None
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    if rank == 1:  # this thread, not those of Gloo
        os.sched_setscheduler(0, os.SCHED_IDLE | os.SCHED_RESET_ON_FORK, os.sched_param(0))
    errors = []
    for _ in range(workers):
        with OrderedWorker() as worker:
            with pytest.raises(RuntimeError) as caught:
                worker.submit(_fails_at_once).wait()
            errors.append(str(caught.value))
        dist.barrier()
    return ["my own error" in error for error in errors]


def _fails_at_once(group):
    raise ValueError("my own error")


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="needs Linux's scheduling policies")
def test_every_rank_raises_its_own_error_where_the_first_job_fails_on_all():
    ranks, workers = 2, 5
    own = run_ranks(_first_jobs_fail, ranks + 1, ranks, workers, backend=None)
    assert own[:ranks] == [[True] * workers] * ranks


def _error_reaches_ddp(rank):
    """A job's error must raise in backward: DDP's reducer waits for the future in C++."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    worker = OrderedWorker()

    def hook(state, bucket):
        def job(group):
            raise ValueError("job failed")

        return worker.submit(job)

    model.register_comm_hook(None, hook)
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="ValueError: job failed"):
        model(torch.ones(2, 4)).sum().backward()
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_an_error_of_a_job_raises_in_backward():
    assert run_ranks(_error_reaches_ddp, 2) == [True, True]


def test_the_interpreter_exits_with_an_open_worker():
    script = """
        import tempfile, torch.distributed as dist
        from dist_utils import OrderedWorker
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        worker = OrderedWorker()
        print(worker.submit(lambda group: group.size()).wait())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"  # some versions of Gloo print before it


def _thread_counts(rank):
    with OrderedWorker() as worker:
        found = []
        for count in (3, 1):
            torch.set_num_threads(count)
            found.append(worker.submit(lambda group: torch.get_num_threads()).wait())
    return found


def test_a_job_uses_as_many_threads_as_its_caller():
    assert run_ranks(_thread_counts, 1) == [[3, 1]]


def _subnormal_numbers(rank):
    """Whether a job's arithmetic treats subnormal numbers as zero, where the caller's does, and where not."""
    found = []
    with OrderedWorker() as worker:
        for flush in (True, False):
            if not torch.set_flush_denormal(flush):
                return None
            found.append(worker.submit(lambda group: 5e-324 * 1.0 == 0.0).wait())
    return found


def test_a_job_treats_subnormal_numbers_as_its_caller_does():
    (found,) = run_ranks(_subnormal_numbers, 1)
    if found is None:
        pytest.skip("this processor cannot")
    assert found == [True, False]
