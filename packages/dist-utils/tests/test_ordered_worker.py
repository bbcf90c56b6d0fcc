"""Jobs of several collectives: in order, concurrent with the caller, an error on every rank if one fails.

Where no ``group_timeout`` is given, ranks that wait for a peer until the group's timeout are hung ranks to
``run_ranks``: they must hear of its error from it. Peers that die or hang: integration_tests/test_peers.py.
"""

import contextlib
import dataclasses
import functools
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils import AgreementError, OrderedWorker
from dist_utils.process_groups import jobs, ordered_worker, worker_thread
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


def _wait_until(condition):
    deadline = time.monotonic() + patience(10.0)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _threads(name):
    return [thread.name for thread in threading.enumerate() if thread.name == name]


def _wait_for_all(*, store_key):
    """Like a barrier, but without the group, which may have a short timeout or be broken."""
    default_store().set(f"{store_key} {dist.get_rank()}", "")
    everyone = [f"{store_key} {rank}" for rank in range(dist.get_world_size())]
    default_store().wait(everyone, timedelta(seconds=300))


def _as_on_an_accelerator():
    """Let workers take CPU tensors for those of an accelerator, whose jobs run in the caller's thread."""
    stream = mock.patch.object(jobs.SideStreams, "behind_caller", lambda _, device: jobs.JobStream(device))
    enqueues = mock.patch.object(ordered_worker, "runs_on_host", return_value=False)
    return stream, enqueues


def _two_threads(rank):
    """Two threads submit jobs of several parts where jobs run in the callers' threads."""
    parts = []

    def job(_):
        for part in range(5):
            parts.append((threading.get_ident(), part))
            time.sleep(0.002)

    stream, enqueues = _as_on_an_accelerator()
    with stream, enqueues, OrderedWorker() as worker:
        threads = [
            threading.Thread(target=lambda: [worker.submit(job).wait() for _ in range(10)]) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return parts


def test_jobs_of_two_threads_on_an_accelerator_run_whole():
    (parts,) = run_ranks(_two_threads, 1)
    assert len(parts) == 100
    for begin in range(0, len(parts), 5):
        whole = parts[begin : begin + 5]
        assert whole == [(whole[0][0], part) for part in range(5)]


def _submit_in_jobs(rank):
    """A job submits to its own worker, on the thread or in the caller's; a callback of its future may."""
    found = []

    def in_parts(worker):
        yield
        worker.submit_in_parts(lambda _: in_parts(worker))

    for patches in ((), _as_on_an_accelerator()):
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(patch)
            other = OrderedWorker()
            for way, job in (
                ("submit", lambda _, worker: worker.submit(_sum).wait()),
                ("submit_in_parts", lambda _, worker: in_parts(worker)),
            ):
                with OrderedWorker() as worker:
                    future = getattr(worker, way)(functools.partial(job, worker=worker))
                    found.append((_error_of(future), type(worker.error).__name__))
            inside = other.submit(lambda _, other=other: OrderedWorker().submit(lambda _: 3.0).wait())
            after = inside.then(lambda done, other=other: other.submit(lambda _: done.value() + 1))
            assert after.wait().wait() == 4.0
            other.close()
    return found


def test_a_job_that_submits_to_its_own_worker_is_an_error_and_not_a_wait_for_ever():
    (found,) = run_ranks(_submit_in_jobs, 1)
    assert len(found) == 4
    for error, kind in found:
        assert "a job of OrderedWorker submits another one, which would wait for it" in error
        assert kind == "RuntimeError"


def _ends(rank):
    """The thread ends when the worker is garbage collected, on close, and on destroy_process_group."""
    seen = {}

    def submit_job_that_knows(worker):
        worker.submit(lambda group: (_sum(group), worker)[0]).wait()

    OrderedWorker(name="unused").close()
    garbage = OrderedWorker(name="garbage")
    seen["thread"] = garbage.submit(lambda _: threading.current_thread().name).wait()
    submit_job_that_knows(garbage)
    del garbage
    gc.collect()
    _wait_until(lambda: not _threads("garbage"))

    closed = OrderedWorker(name="closed")
    pending = closed.submit(_sum)
    closed.close()
    closed.close()
    seen["closed"] = pending.wait(), _threads("closed")
    with pytest.raises(RuntimeError, match="closed is closed"):
        closed.submit(_sum)

    destroyed = OrderedWorker(name="destroyed")
    destroyed.submit(_sum).wait()
    dist.barrier()
    time.sleep(0.2)  # torch 2.6 can deadlock if its threads are still busy (torch_compat)
    dist.destroy_process_group()
    gc.collect()
    _wait_until(lambda: not _threads("destroyed"))
    seen["destroyed"] = _error_of(destroyed.submit(_sum))
    return seen


def test_no_thread_outlives_its_worker_or_the_process_group():
    for seen in run_ranks(_ends, 2):
        assert "the process group of destroyed was destroyed" in seen.pop("destroyed")
        assert seen == {"thread": "garbage", "closed": (2.0, [])}


def _starts(rank):
    """Workers made and dropped in turn on ranks with different numbers of groups; threads that race."""
    dist.new_group([0, 2])  # ranks 0 and 2 now have one more than rank 1
    pair, pairs = dist.new_group([0, 1]), [dist.new_group([0, 1]) for _ in range(2)]
    if rank == 2:
        return None
    in_turn = []
    for _ in range(5):
        with OrderedWorker(pair) as worker:
            in_turn.append(worker.submit(_sum).wait())

    def in_threads(works):
        threads = [threading.Thread(target=work) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    # The first job of one worker, from several threads at once: one private group.
    with OrderedWorker(pair) as worker:
        gate, at_once = threading.Barrier(4), []

        def submit():
            gate.wait()
            at_once.append(worker.submit(_sum).wait())

        in_threads([submit] * 4)
    crossed = {}
    if hasattr(dist.Store, "clone"):  # else threads share one connection to the store
        # Each thread has a group of its own; the threads start in a different order on each rank.
        def cross(index):
            time.sleep(0.5 * (index == rank))
            with OrderedWorker(pairs[index]) as worker:
                crossed[index] = worker.submit(_sum).wait()

        in_threads([lambda: cross(0), lambda: cross(1)])
    return in_turn, at_once, crossed


def test_workers_start_on_ranks_with_other_groups_and_from_many_threads():
    first, second, outside = run_ranks(_starts, 3)
    assert first == second
    assert outside is None
    in_turn, at_once, crossed = first
    assert (in_turn, at_once) == ([2.0] * 5, [2.0] * 4)
    assert crossed in ({}, {0: 2.0, 1: 2.0})


def _different_terms(rank):
    """Nothing runs, every rank hears why, and new workers with equal terms start."""

    def fail_on_rank_1():
        if rank == 1:
            raise LookupError("no terms")
        return {}

    found, ran = [], []
    for name, terms in (
        ("hook", lambda: {"bits": 8 if rank else 4}),
        ("hook", fail_on_rank_1),
    ):
        with OrderedWorker(name=name, terms=terms) as worker:
            found.append([_error_of(worker.submit(ran.append)) for _ in range(2)])
            found[-1].append(type(worker.error))
    with OrderedWorker(name="hook", terms=lambda: {"bits": 8}) as again:
        return found, ran, again.submit(_sum).wait()


def test_workers_with_different_terms_start_on_no_rank():
    for rank, (found, ran, total) in enumerate(run_ranks(_different_terms, 2)):
        assert (ran, total) == ([], 2.0)
        (first, second, kind), (own, again, own_kind) = found
        assert "AgreementError: hook differs between ranks: bits is 4 on rank 0, 8 on rank 1" in first
        assert "LookupError: no terms" in own
        assert (second, again) == (first, own)
        assert (kind, own_kind) == (AgreementError, LookupError if rank else AgreementError)


def _missing_rank(rank):
    """One rank does not submit the first job; then all start again, as after an error."""
    message = ""
    if rank != 0:
        with OrderedWorker(name="hook") as worker:
            message = _error_of(worker.submit(_sum))
    _wait_for_all(store_key="failed")
    with OrderedWorker(name="hook") as again:
        return message, again.submit(_sum).wait()


def test_a_failed_start_does_not_affect_the_next_one():
    limit = patience(1.5)
    (_, total), *others = run_ranks(_missing_rank, 3, group_timeout=limit)
    assert total == 3.0
    for message, total in others:
        assert f"hook: ranks [1, 2] came within {limit:g} s, ranks [0] did not" in message
        assert total == 3.0


def _stopped_starts(rank):
    """A signal stops one rank's start, and all workers are closed while they start: nothing is left."""

    def thread_names():
        return [thread.name for thread in threading.enumerate() if thread.name != "store"]

    threads = thread_names()

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
    _wait_until(lambda: thread_names() == threads)
    return found


def test_a_start_that_is_interrupted_or_closed_leaves_nothing():
    for found in run_ranks(_stopped_starts, 2):
        for text in found:
            assert "KeyboardInterrupt" in text


def _interrupted(rank):
    """A signal ends one rank's wait for a third: both that wait hear of it at once, and again later."""
    worker = OrderedWorker()
    worker.agree()
    texts = []
    if rank == 1:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
        threading.Timer(1.0, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    for _ in range(2 if rank < 2 else 0):
        try:
            worker.require_same_terms("call", {})
        except (KeyboardInterrupt, RuntimeError) as error:
            texts.append(repr(error))
    _wait_for_all(store_key="interrupted")
    return texts


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_an_interrupted_comparison_is_an_error_on_every_rank_that_waits():
    first, second, _ = run_ranks(_interrupted, 3)
    for text in first:
        assert "rank 1 stopped waiting: KeyboardInterrupt" in text
    assert len(first) == len(second) == 2
    for text in second:
        assert "KeyboardInterrupt" in text


class _Interrupting:
    def __repr__(self):
        raise KeyboardInterrupt


def _interrupted_before(rank):
    """A signal comes while rank 0 writes down its terms; rank 1 does not come to the comparison."""
    worker = OrderedWorker()
    worker.agree()
    if rank == 0:
        with pytest.raises(KeyboardInterrupt):
            worker.require_same_terms("call", {"term": _Interrupting()})


def test_an_interrupt_before_a_comparison_does_not_wait_for_other_ranks():
    run_ranks(_interrupted_before, 2)


def _held(group):
    """Keep the group in a frame that keeps its error, too: a cycle."""
    try:
        dist.get_process_group_ranks(group)[99]
    except IndexError as error:
        kept = error
        raise RuntimeError("another one") from kept


def _exits(group):
    sys.exit(4)


@dataclasses.dataclass(frozen=True)
class _ListingError(Exception):
    """Takes no new attribute, and has one with the name of an exception group's."""

    exceptions: list[str]


def _lists(group):
    raise _ListingError(["of", "texts"])


def _raises(group):
    raise ValueError("bad bucket 1")


FAILURES = {_raises: ("ValueError: bad bucket 1", "ValueError")}
if GROUPS_END_WITHOUT_GIL:  # torch 2.6 cannot end a group before its process
    FAILURES |= {
        _held: ("another one", "RuntimeError"),
        _exits: ("SystemExit(4)", "RuntimeError"),
        _lists: ("_ListingError", "_ListingError"),
    }


def _one_rank_fails(rank, fail):
    """Rank 1's second job raises before it communicates; its peer waits in the collective."""
    worker, ran, groups = OrderedWorker(), [], []

    def job(group, index):
        ran.append(index)
        groups.append(weakref.ref(group))
        if rank == 1 and index == 1:
            time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
            fail(group)
        return _sum(group)

    futures = [worker.submit(lambda group, index=index: job(group, index)) for index in range(3)]
    found = [futures[0].wait(), *map(_error_of, futures[1:]), _error_of(worker.submit(job))]
    if GROUPS_END_WITHOUT_GIL:
        _wait_until(lambda: groups[0]() is None)  # without another collective, and with the worker alive
    worker.wait()
    _wait_for_all(store_key=fail.__name__)  # the failed rank keeps its worker until then
    return found, ran, type(worker.error).__name__


def _one_rank_fails_in_every_way(rank):
    return [_one_rank_fails(rank, fail) for fail in FAILURES]


def test_the_first_error_is_given_to_every_later_job_and_ends_the_peers_wait():
    limit = None if GROUPS_END_WITHOUT_GIL else 5.0  # at which the peer's wait ends there
    of_peer, of_failed = run_ranks(_one_rank_fails_in_every_way, 2, group_timeout=limit)
    for peer, failed, expected in zip(of_peer, of_failed, FAILURES.values(), strict=True):
        (peer_total, *_), peer_ran, _ = peer
        (total, *messages), ran, kind = failed
        assert total == peer_total == 2.0
        for message in messages:
            assert expected[0] in message
        assert kind == expected[1]
        assert ran == peer_ran == [0, 1], "no job runs after the first error"


def _fail_at_once(rank):
    """All ranks fail in their first job, where the others may not be connected yet: each raises its own."""
    for _ in range(5):
        with OrderedWorker() as worker:
            text = _error_of(worker.submit(lambda _: 1 / 0))
        assert "ZeroDivisionError: division by zero" in text
        dist.barrier()


def _error_reaches_ddp(rank):
    """A job's error must raise in backward: DDP's reducer waits for the future in C++."""
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    worker = OrderedWorker()
    model.register_comm_hook(None, lambda state, bucket: worker.submit(lambda _: 1 / 0))
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        model(torch.ones(2, 4)).sum().backward()


def test_the_interpreter_exits_with_an_open_worker():
    script = """
        import torch.distributed as dist
        from dist_utils import OrderedWorker
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        worker = OrderedWorker()
        print(worker.submit(lambda group: group.size()).wait())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1"  # some versions of Gloo print before it


def _settings(rank):
    """What torch sets for each thread: how many threads operators use, and whether tiny numbers are zero."""
    found = []
    with OrderedWorker() as worker:
        for count, flush in ((3, True), (1, False)):
            torch.set_num_threads(count)
            can_flush = torch.set_flush_denormal(flush)  # not every processor can
            seen = worker.submit(lambda _: (torch.get_num_threads(), 5e-324 * 1.0 == 0.0)).wait()
            found.append((seen, (count, flush and can_flush)))
    return found


def test_a_job_has_the_settings_of_its_callers_thread():
    for seen, callers in run_ranks(_settings, 1)[0]:
        assert seen == callers


def _products(rank, threads):
    """Matrix products in a thread other than the main one, before and after a job was submitted there."""
    torch.manual_seed(0)
    wide, tall = torch.randn(37, 5011), torch.randn(5011, 41)
    torch.set_num_threads(threads)
    found = []

    def loop():
        found.append(wide @ tall)
        with OrderedWorker() as worker:
            worker.submit(_sum).wait()
            found.append(wide @ tall)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return found


@pytest.mark.parametrize("threads", [1, 3])
def test_submitting_a_job_leaves_the_bits_of_the_callers_products(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # else other threads than the main one may agree by chance
    for before, after in run_ranks(_products, 2, threads):
        assert torch.equal(before, after)


def _leave_no_keys(rank):
    """Workers that have ended leave nothing in the store."""
    store = default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(5):
        with OrderedWorker() as worker:
            worker.submit(_sum).wait()
    dist.barrier()
    assert store.num_keys() == before
    dist.barrier()


def _waits(rank):
    """wait() returns after all jobs so far, failed or not, even on a closed worker."""
    done, worker = [], OrderedWorker()
    worker.wait()
    for _ in range(2):
        worker.submit(lambda group: (time.sleep(0.2), done.append(_sum(group))))
    worker.wait()
    seen = [*done]
    worker.submit(lambda group: 1 / 0)
    worker.wait()
    seen.append(type(worker.error).__name__)
    worker.close()
    worker.wait()
    assert seen == [2.0, 2.0, "ZeroDivisionError"]


def _ends_of_jobs(rank):
    for check in (_leave_no_keys, _error_reaches_ddp, _waits, _fail_at_once):
        check(rank)


def test_jobs_are_waited_for_their_errors_reach_backward_and_their_ends_leave_nothing_in_the_store():
    run_ranks(_ends_of_jobs, 2)


def _waits_anywhere(_):
    """A signal comes at every line of a submission, and its handler waits, as if to save a checkpoint."""
    worker = OrderedWorker()
    worker.submit(_sum).wait()
    waited = []

    def handle(*_):
        worker.wait()
        waited.append(True)

    def interrupt(frame, event, _):
        if event == "line":
            signal.raise_signal(signal.SIGUSR1)
        return interrupt if frame.f_code.co_filename == worker_thread.__file__ else None

    signal.signal(signal.SIGUSR1, handle)
    sys.settrace(interrupt)
    result = worker.submit(_sum)
    sys.settrace(None)
    assert result.wait() == 2
    worker.close()
    return len(waited) > 5


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs POSIX signals")
def test_a_signal_handler_may_wait_in_the_middle_of_a_submission():
    assert run_ranks(_waits_anywhere, 2, timeout=60) == [True] * 2
