"""A store that never answers: an error by the group's timeout, no hang, not even of the process's end."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dist_utils import AgreementError, OrderedWorker, require_same_terms
from dist_utils.process_groups import store as store_requests
from dist_utils.process_groups.store import ask_store, store_answers
from dist_utils.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="cannot stop a process")

TIMEOUT = 2.0

SERVER = """
import signal, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
signal.pause()
"""


def _join(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)


def _sum(group):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def _stopped(rank, port, pid):
    """Return how long each call took until it raised, after the store was stopped."""
    _join(rank, port)
    used, late = OrderedWorker(), OrderedWorker()
    used.submit(_sum).wait()
    name = late.agree()
    assert name
    require_same_terms(None, "the store answers")
    dist.barrier()
    if rank == 0:
        os.kill(pid, signal.SIGSTOP)
    dist.barrier()
    took = {}

    def measure(what, call, error, text):
        began = time.monotonic()
        with pytest.raises(error, match=text):
            call()
        took[what] = time.monotonic() - began

    unanswered = "hook: the process group's store has not answered within 4 s"
    measure("compare", lambda: require_same_terms(None, "hook"), AgreementError, unanswered)
    assert not store_answers()
    measure("start", late.submit(_sum).wait, RuntimeError, "store has not answered within 2 s")
    for what, worker in (("close", used), ("close the failed one", late)):
        began = time.monotonic()
        worker.close()
        took[what] = time.monotonic() - began
    if rank == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        measure("interrupt", lambda: require_same_terms(None, "hook"), KeyboardInterrupt, "")
    return took


@pytest.fixture
def server():
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def test_a_store_that_does_not_answer_is_an_error_at_the_timeout(server):
    port = int(server.stdout.readline())
    for took in run_ranks(_stopped, 2, port, server.pid, backend=None):  # they end, although threads wait
        assert took["compare"] < 2 * TIMEOUT + 2
        assert took["close"] < 1.0
        assert took["close the failed one"] < 1.0
        assert took.get("interrupt", 0) < TIMEOUT + 2


def _joined(rank, port, pid, waits_already):
    """Rank 1 gives up while the store is stopped, and tries again; rank 0 makes its first call after that."""
    _join(rank, port)
    dist.barrier()
    attempts = []
    if rank == 1 and not waits_already:
        time.sleep(0.5)
    if rank == 0:
        time.sleep(0.25)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(TIMEOUT + 3.0)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
    titles = ["first", "second", "third"]
    while titles and len(attempts) < 10:
        try:
            attempts.append(require_same_terms(None, titles[0]))
            del titles[0]
        except AgreementError as error:
            attempts.append(str(error))
    return attempts


@pytest.mark.parametrize("waits_already", [False, True])
def test_who_gave_up_does_not_count_and_the_next_attempts_meet(server, waits_already):
    port = int(server.stdout.readline())
    first, second = run_ranks(_joined, 2, port, server.pid, waits_already, backend=None)
    gave_up = "first: the process group's store has not answered within 4 s"
    assert second == [gave_up, *first]
    assert len(first) == 3


def _leaves(rank, path):
    """Rank 0 keeps the store; it comes late, and its process ends as soon as it has compared."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # run_ranks has set it; no agent keeps this store
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    while not path.exists():
        time.sleep(0.01)
    if rank > 0:
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
    dist.barrier()
    if rank == 0:
        time.sleep(3.0)
    name = require_same_terms(None, "last")
    if rank == 0:
        os._exit(0)
    return name


def test_all_read_the_verdict_before_the_rank_that_keeps_the_store_leaves(tmp_path):
    _, second, third = run_ranks(_leaves, 3, tmp_path / "port", backend=None, may_die={0})
    assert second == third


LEAVING = """
import sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from dist_utils import AgreementError, require_same_terms
from dist_utils.torch_compat import default_store
def await_keys(*names):
    first = f"dist_utils/0/{dist.group.WORLD.group_name}:0/0/digests"
    while not default_store().check([f"{first}/{one}" for one in names]):
        time.sleep(0.01)
def compare():
    try:
        require_same_terms(None, "hook")
    except AgreementError as error:
        return error
port, rank = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=30))
dist.barrier()
if rank == 0:
    def again_and_again():
        while True:
            compare()
    threading.Thread(target=again_and_again, daemon=True).start()
    await_keys(0, 1)
elif rank == 1:
    print(compare())
else:
    await_keys("verdict")
"""


def test_a_process_may_end_while_a_thread_compares_and_its_peers_hear_of_it(server):
    port = server.stdout.readline()
    with contextlib.ExitStack() as until_end:
        first, second, third = (
            until_end.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", LEAVING, port, str(rank)], stdout=subprocess.PIPE, text=True
                )
            )
            for rank in range(3)
        )
        for one in (first, second, third):
            until_end.callback(one.kill)
        heard = second.communicate(timeout=60)[0]
        third.wait(timeout=60)
        first.wait(timeout=60)
    assert heard == "hook: rank 0 stopped waiting: its process ends\n"
    assert [one.returncode for one in (first, second, third)] == [0, 0, 0]


ENDING = """
import os, signal, sys
import pytest, torch.distributed as dist
from dist_utils.process_groups.store import ask_store
port, server = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", port, is_master=False)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
os.kill(server, signal.SIGSTOP)
with pytest.raises(dist.DistError):
    while True:  # until it has stopped
        ask_store(lambda store: store.check(["key"]), 0.1)
os.kill(server, signal.SIGKILL)
"""


def test_a_process_ends_as_usual_when_its_store_ends_with_it(server):
    port = server.stdout.readline()
    ended = subprocess.run([sys.executable, "-c", ENDING, port, str(server.pid)], timeout=60, check=False)
    assert ended.returncode == 0


def _late(rank, port, pid):
    """What comes when nobody waits is undone, its connection is used again, and no thread is left."""
    _join(rank, port)
    undone, entered = [], threading.Event()
    dist.barrier()

    def slowly(store):
        entered.set()
        time.sleep(1.0)
        return store.check(["nothing"])

    with pytest.raises(dist.DistError, match="has not answered within"):
        ask_store(slowly, 0.1, undone.append)
    waiting = [store_answers(), len(undone)]
    while not undone:
        time.sleep(0.05)
    time.sleep(0.1)
    gone = sum(thread.name == "store" for thread in threading.enumerate())
    return waiting, store_answers(), undone, gone


def test_what_comes_late_is_undone(server):
    port = int(server.stdout.readline())
    for seen in run_ranks(_late, 2, port, server.pid, backend=None):
        assert seen == ([False, 0], True, [False], 0)


class _Held:
    """What requests refer to."""


def _failing_requests(_):
    """Return whether nothing is left of requests that have failed, without the garbage collector."""
    gc.disable()
    held = _Held()
    left = weakref.ref(held)

    def requests(_, held=held):
        raise ValueError("no")

    with contextlib.suppress(ValueError):
        ask_store(requests, 10.0)
    del held, requests
    end = time.monotonic() + 10.0
    while left() is not None and time.monotonic() < end:  # their thread is about to end
        time.sleep(0.01)
    return left() is None


def test_requests_that_fail_leave_no_cycle():
    assert run_ranks(_failing_requests, 1) == [True]


def _from_many_threads(_):
    """Each thread has a connection to itself, and takes any that is free."""
    interval, failed = sys.getswitchinterval(), []

    def ask():
        try:
            for _ in range(300):
                ask_store(lambda store: store.check(["nothing"]), timedelta.max.total_seconds())
        except Exception as error:  # noqa: BLE001 - raised where the test sees it
            failed.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:
        sys.setswitchinterval(interval)
    return failed


def test_many_threads_ask_at_once():
    assert run_ranks(_from_many_threads, 1) == [[]]


def _forked(rank):
    """A fork of each rank compares, too, on a connection of its own, while its rank does."""
    require_same_terms(None, "a connection is left for the next comparison")
    assert not hasattr(dist.TCPStore, "clone") or sum(
        spare.qsize() for spare in store_requests._spare.values()
    )
    dist.barrier()
    child = os.fork()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "2" if child else "1"  # parents and children meet apart
    for number in range(50):
        require_same_terms(None, "hook", {"number": number})
    if child == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(dist.TCPStore, "clone"), reason="this torch has one connection only")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_connections_of_its_own():
    assert run_ranks(_forked, 2) == [7, 7]
