"""The base of hook states: which ranks share a host, refusals until close(), forks, destroyed groups."""

import ctypes
import gc
import os
import pickle
import signal
import socket
import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils import AgreementError, OrderedWorker
from dist_utils.comm_hooks import HookState, failed_future
from dist_utils.testing import patience, run_ranks
from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL, default_store

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
    state.bucket_came()
    buffer = bucket.buffer()
    try:
        state.require_same_bucket("hook", bucket)
    except RuntimeError as error:
        return failed_future(error, buffer)

    def job(group):
        dist.all_reduce(buffer, group=group)
        return buffer.div_(group.size())

    return state.worker.submit(job)


def _hosts(rank):
    state = _State()
    same = state.hosts()
    assert state.worker.notes() == [f"of rank {one}" for one in range(3)]
    alone = rank == 1 and ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0
    if alone:
        socket.sethostname("another-host")
    return same, _State().hosts(), alone


def test_ranks_know_which_of_them_share_a_host():
    found = run_ranks(_hosts, 3)
    assert [same for same, _, _ in found] == [[0, 0, 0]] * 3
    if not found[1][2]:
        pytest.skip("this user cannot give a process a host name of its own")
    assert [different for _, different, _ in found] == [[0, 1, 0]] * 3


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
    texts = [_text(state.require_same_call, "call", {"rank": rank}, ())]
    assert _text(state.require_same_call, "call", {}, ()) == texts[0]
    assert type(state.worker.error) is AgreementError
    texts.append(_text(state.worker.submit(_sum).wait))
    state.wait()
    deadline = time.monotonic() + patience(10.0)
    while GROUPS_END_WITHOUT_GIL and len(dist.distributed_c10d._world.pg_map) > 1:
        assert time.monotonic() < deadline, "the private group lives on"
        time.sleep(0.01)
    dist.barrier()
    state.close()
    state.require_same_call("call", {}, ())
    return texts, state.worker.submit(_sum).wait()


def test_a_refusal_is_raised_until_the_state_is_closed():
    for texts, total in run_ranks(_refused, 2):
        assert all("rank is 0 on rank 0, 1 on rank 1" in text for text in texts)
        assert total == 2.0


def _refused_alone(rank):
    """One rank is refused because its peer does not come, which waits in a job of both."""
    state = _State()
    state.worker.submit(_sum).wait()
    began = time.monotonic()
    if rank == 0:
        text = _text(state.require_same_call, "call", {}, ())
    else:
        text = _text(state.worker.submit(_sum).wait)
    return text, time.monotonic() - began, state.worker.error is not None


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_a_refusal_on_one_rank_ends_the_jobs_of_its_peers():
    limit = patience(3.0)
    (first, _, _), (second, seconds, failed) = run_ranks(_refused_alone, 2, group_timeout=limit)
    assert f"ranks [0] came within {limit:g} s, ranks [1] did not" in first
    assert failed, second
    assert seconds < 2 * limit + patience(3.0)


def _interrupted(rank):
    """A signal ends one rank's wait for a third: both that wait hear of it at once, and again later."""
    worker = OrderedWorker()
    worker.agree()
    dist.barrier()
    if rank == 2:
        default_store().wait(["0", "1"])
        return None
    began = time.monotonic()

    def interrupt():
        default_store().wait(["rank 0 asks"])
        time.sleep(patience(0.5))
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    if rank == 0:
        default_store().set("rank 0 asks", "")
    else:
        threading.Thread(target=interrupt).start()
    texts = []
    for _ in range(2):
        try:
            worker.require_same_terms("call", {})
        except (KeyboardInterrupt, RuntimeError) as error:
            texts.append(repr(error))
    default_store().set(str(rank), "")
    return texts, type(worker.error).__name__, time.monotonic() - began


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs POSIX signals")
def test_an_interrupted_comparison_is_an_error_on_every_rank_that_waits():
    first, second, _ = run_ranks(_interrupted, 3, group_timeout=60.0)
    assert ["rank 1 stopped waiting: KeyboardInterrupt" in text for text in first[0]] == [True, True], first[
        0
    ]
    assert "KeyboardInterrupt" in second[0][0]
    assert "KeyboardInterrupt" in second[0][1]
    for _, kind, seconds in (first, second):
        assert kind in {"AgreementError", "RuntimeError"}
        assert seconds < 30


class _HeldError(Exception):
    pass


def _keeps_its_worker(rank):
    """A job fails on a rank that stays alive and keeps its worker."""
    worker = OrderedWorker()

    def job(group):
        if rank == 1:
            time.sleep(1.0)  # Gloo may miss a connection that closes just as a wait on it starts
            raise _HeldError
        dist.all_reduce(torch.ones(1), group=group)

    began = time.monotonic()
    _text(worker.submit(job).wait)
    seconds = time.monotonic() - began
    default_store().set(str(rank), "")
    default_store().wait(["0", "1"])
    return seconds, worker.error is not None


@pytest.mark.skipif(not GROUPS_END_WITHOUT_GIL, reason="torch 2.6 cannot end a group before its process")
def test_peers_hear_of_a_failed_job_whose_worker_is_kept():
    for seconds, failed in run_ranks(_keeps_its_worker, 2, group_timeout=60.0, timeout=120):
        assert failed
        assert seconds < 30


def _trained(rank):
    """A model's state takes its group; whatever the ranks differ in stops the pass, and the next one."""
    ddp = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=dist.new_group())
    state = _State(bits=8 + rank).bind(ddp)
    assert state.process_group is ddp.process_group
    ddp.register_comm_hook(state, _hook)
    texts = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            ddp(torch.ones(1, 3)).sum().backward()
        texts.append(str(caught.value))
    state.bits = 8
    state.close()
    again = DistributedDataParallel(torch.nn.Linear(3, 3))
    again.register_comm_hook(state, _hook)
    again(torch.full((1, 3), float(rank))).sum().backward()
    return texts, again.module.weight.grad[0, 0].item()


def test_a_model_trains_again_when_all_ranks_have_closed_a_refused_state():
    for texts, gradient in run_ranks(_trained, 2):
        assert all("bits is 8 on rank 0, 9 on rank 1" in text for text in texts)
        assert gradient == 0.5


def _sparse_on_one_rank(rank):
    ddp = DistributedDataParallel(torch.nn.Embedding(4, 3, sparse=rank == 1))
    ddp.register_comm_hook(_State(), _hook)
    return _text(lambda: ddp(torch.tensor([1])).sum().backward())


def test_a_bucket_that_is_sparse_on_one_rank_only_is_refused_on_all():
    for text in run_ranks(_sparse_on_one_rank, 2, group_timeout=patience(10.0)):
        assert "sparse is False on rank 0, True on rank 1" in text


def _in_fork(rank):
    """A forked process has no thread: jobs are refused there, and there is nothing to wait for."""
    state = _State()
    state.worker.submit(_sum).wait()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        state.wait()
        try:
            text = _text(state.worker.submit, _sum)
        except BaseException as error:  # noqa: BLE001 - the parent must see it
            text = repr(error)
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    busy = threading.Event()
    state.worker.submit(lambda _: busy.wait())
    child = os.fork()
    if child == 0:
        os._exit("was forked while jobs" in _text(state.wait))
    _, code = os.waitpid(child, 0)
    busy.set()
    return text, os.waitstatus_to_exitcode(code), state.worker.submit(_sum).wait()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_neither_hangs_nor_sends():
    for text, code, total in run_ranks(_in_fork, 2):
        assert "forked" in text
        assert code == 1
        assert total == 2.0


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
    with pytest.warns(UserWarning, match="pickles without its process group"):
        copied = pickle.loads(pickle.dumps(state))
    return copied.worker.submit(_sum).wait()


def test_a_state_of_a_destroyed_group_says_so():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_ranks(_destroyed, 2, server.port, backend=None) == [2.0, 2.0]
