"""The base of hook states: hosts, refusals until close(), forks, destroyed groups."""

import ctypes
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from simulated_bucket import SimulatedBucket
from torch.nn.parallel import DistributedDataParallel

from dist_utils import AgreementError, OrderedWorker
from dist_utils.comm_hooks import HookState, failed_future
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS


class _State(HookState):
    def __init__(self, process_group=None, bits=8):
        super().__init__(process_group)
        self.bits = bits

    def terms(self):
        return {"bits": self.bits}

    def note(self):
        return f"of rank {dist.get_rank()}"


def _hook(state: _State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    try:
        state.begin_bucket("hook", bucket)
    except Exception as error:  # noqa: BLE001 - as the example of HookState
        state.fail(error)
        return failed_future(error, buffer)

    def job(group):
        dist.all_reduce(buffer, group=group)
        return buffer.div_(group.size())

    return state.worker.submit(job)


def _hosts(rank):
    state = _State()
    same, notes = state.hosts(), state.worker.notes()
    alone = rank == 1 and ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0
    if alone:
        socket.sethostname("another-host")
    return same, notes, _State().hosts(), alone


def test_ranks_know_which_of_them_share_a_host():
    found = run_ranks(_hosts, 3)
    expected = [0, 1, 0] if found[1][3] else [0, 0, 0]
    for same, notes, different, _ in found:
        assert (same, notes, different) == ([0, 0, 0], [f"of rank {one}" for one in range(3)], expected)
    if not found[1][3]:
        pytest.skip("this user cannot give a process a host name of its own")


def _sum(group):
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    return total.item()


def _text(call, *arguments):
    with pytest.raises(RuntimeError) as caught:
        call(*arguments)
    return str(caught.value)


def _refused(rank):
    """A refusal is an error of everything that follows, until all ranks close their state."""
    state = _State()
    assert state.worker.submit(_sum).wait() == 2.0
    texts = [_text(state.require_same_call, "call", {"rank": rank}, ()) for _ in range(2)]
    texts += [_text(state.require_same_call, "call", {}, ()), _text(state.worker.submit(_sum).wait)]
    assert type(state.worker.error) is AgreementError
    state.wait()
    dist.barrier()
    state.close()
    state.require_same_call("call", {}, ())
    assert state.worker.submit(_sum).wait() == 2.0
    for text in texts:
        assert "rank is 0 on rank 0, 1 on rank 1" in text


def _agreed(rank):
    """A bucket that comes again is one object, in which a state may note something, until it changes."""
    state = _State()
    one, other, wide = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    state.begin_bucket("hook", SimulatedBucket(one, other, wide)).plan = "noted"

    def is_known(title, *parameters, index=0):
        return state.begin_bucket(title, SimulatedBucket(*parameters, index=index)).plan == "noted"

    found = {
        "again": is_known("hook", one, other, wide),
        "another hook": is_known("other", one, other, wide),
        "another index": is_known("hook", one, other, wide, index=1),
        "still there": is_known("hook", one, other, wide),
    }
    for what, parameters in {"another order": (one, wide, other), "fewer": (one, other)}.items():
        found[what] = is_known("hook", *parameters)
        state.begin_bucket("hook", SimulatedBucket(one, other, wide)).plan = "noted"
    wide.data = torch.ones(3, 2).t()
    found["another order in memory"] = is_known("hook", one, other, wide)
    state.begin_bucket("hook", SimulatedBucket(one, other, wide)).plan = "noted"
    state.close()
    found["after close()"] = is_known("hook", one, other, wide)
    assert [what for what, known in found.items() if known] == ["again", "still there"]
    state.fail(RuntimeError("stop"))
    assert _text(state.begin_bucket, "hook", SimulatedBucket(one, other, wide)) == "stop"


def _fails_alone(rank, error, kind):
    """Rank 1 fails between two jobs, while its peer waits for it in a job; return what each has heard."""
    state = _State()
    assert state.worker.submit(_sum).wait() == 2.0
    if rank == 0:
        return _text(state.worker.submit(_sum).wait)
    time.sleep(0.5)  # Gloo may miss a connection that closes just as a wait on it starts
    error(state)
    state.wait()
    assert type(state.worker.error) is kind
    return str(state.worker.error)


def _ways_to_fail(rank):
    """A hook fails, or a comparison for which the peer, which waits, does not come."""

    def in_hook(state):
        state.fail(KeyError("of the hook"))

    def refused(state):
        with pytest.raises(AgreementError):
            state.require_same_call("call", {}, ())

    return [_fails_alone(rank, in_hook, KeyError), _fails_alone(rank, refused, AgreementError)]


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_an_error_of_a_hook_and_a_refusal_on_one_rank_end_the_jobs_of_its_peers():
    limit = patience(2.0)
    _, (failed, refused) = run_ranks(_ways_to_fail, 2, group_timeout=limit)
    assert "of the hook" in failed
    assert f"ranks [1] came within {limit:g} s, ranks [0] did not" in refused


def _in_fork(rank):
    """A forked process has no thread: jobs fail there, and there is nothing to wait for."""
    state = _State()
    state.worker.submit(_sum).wait()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        state.wait()
        try:
            text = _text(state.worker.submit(_sum).wait)
        except BaseException as error:  # noqa: BLE001 - the parent must see it
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text, state.worker.submit(_sum).wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_neither_hangs_nor_sends():
    for text, total in run_ranks(_in_fork, 2):
        assert "forked" in text
        assert total == 2.0


def _forks_of_a_busy_process(rank):
    """Fork while another thread submits; return how many forks end by themselves."""
    worker = OrderedWorker()
    worker.submit(_sum).wait()
    ending = threading.Event()

    def submit():
        while not ending.is_set():
            worker.submit(lambda _: None)

    thread = threading.Thread(target=submit)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a fork comes in the middle of a call
    thread.start()
    codes = []
    for _ in range(40):
        child = os.fork()
        if child == 0:
            signal.alarm(5)
            worker.wait()
            text = _text(worker.submit(_sum).wait)
            os._exit("forked" not in text)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    ending.set()
    thread.join()
    sys.setswitchinterval(interval)
    return codes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_does_not_wait_for_what_a_thread_was_doing():
    assert run_ranks(_forks_of_a_busy_process, 2) == [[0] * 40] * 2


def _destroyed(rank, port):
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("1", store), rank=rank, world_size=2)
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    state = _State().bind(ddp)
    ddp.register_comm_hook(state, _hook)
    ddp(torch.ones(1, 3)).sum().backward()
    dist.barrier()
    time.sleep(0.2)  # torch 2.6 can deadlock if its threads are still busy (torch_compat)
    dist.destroy_process_group()
    gc.collect()
    dist.init_process_group("gloo", store=dist.PrefixStore("2", store), rank=rank, world_size=2)
    with pytest.raises(ValueError, match="the process group was destroyed"):
        state.worker.submit(_sum)
    with pytest.raises(ValueError, match="was destroyed: make a new hook state"):
        state.bind(DistributedDataParallel(torch.nn.Linear(3, 3)))
    with pytest.warns(UserWarning, match="pickles without its process group"):
        copied = pickle.loads(pickle.dumps(state))
    return copied.worker.submit(_sum).wait()


def test_a_state_of_a_destroyed_group_says_so():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(_destroyed, 2, server.port, backend=None) == [2.0, 2.0]


def _kept(rank, port, close):
    """Make a group, use it and destroy it, several times, and keep the bound states."""
    store, kept, seen = dist.TCPStore("127.0.0.1", port, is_master=False), [], []
    for cycle in range(4):
        own = dist.PrefixStore(f"{close} {cycle}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
        ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
        kept.append(_State().bind(ddp))
        ddp.register_comm_hook(kept[-1], _hook)
        ddp(torch.ones(1, 3)).sum().backward()
        dist.barrier()
        if close:
            kept[-1].close()
        del ddp
        gc.collect()
        time.sleep(0.2)  # torch 2.6 can deadlock if its threads are still busy (torch_compat)
        dist.destroy_process_group()
        del own
        gc.collect()
        time.sleep(0.5)
        seen.append([len([*Path("/proc/self", kind).iterdir()]) for kind in ("task", "fd")])
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads and descriptors in /proc")
@pytest.mark.parametrize("close", [True, False])
def test_a_state_that_is_kept_keeps_no_destroyed_group(close):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for first, *later in run_ranks(_kept, 2, server.port, close, backend=None):
        assert later == [first] * 3


class _Counting(_State):
    told = 0

    def terms(self):
        self.told += 1
        return super().terms()


def _terms(rank):
    """Terms are asked for once, and again when the state is closed or bound to another model."""
    state, asked = _Counting(), []
    for _ in range(2):
        ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
        ddp.register_comm_hook(state.bind(ddp), _hook)
        for _ in range(3):
            ddp(torch.ones(1, 3)).sum().backward()
        asked.append(state.told)
    state.bits = 8 - rank
    ddp(torch.ones(1, 3)).sum().backward()
    state.close()
    with pytest.raises(RuntimeError, match="bits is 8 on rank 0, 7 on rank 1") as caught:
        ddp(torch.ones(1, 3)).sum().backward()
    del ddp, caught
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3))
    state.bind(ddp)
    assert asked == [1, 2]
    told = _text(state.require_same_call, "call", {}, ())
    assert "bits is 8 on rank 0" in told, "a state with an error keeps it when it is bound"


def _compared(rank):
    for check in (_refused, _agreed, _terms):
        check(rank)


def test_terms_and_buckets_are_compared_once_and_refusals_stay_until_the_state_is_closed():
    run_ranks(_compared, 2)
