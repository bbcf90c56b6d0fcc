"""The thread of an ordered worker and its private group: it runs jobs in order, and tells peers of errors."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import FirstError, drop_frames
from dist_utils.process_groups.groups import store_connection
from dist_utils.process_groups.side_stream import SideStream, complete, device_of, fail, new_future

T = TypeVar("T")

_STOP_SECONDS = 5.0
"""How long stopping waits for a job in progress. The thread is a daemon, so the interpreter can exit."""


class _Job(NamedTuple):
    """A job for the thread, with the settings of the caller's thread."""

    run: Callable[[dist.ProcessGroup], Any]
    done: torch.futures.Future[Any]
    side: SideStream | None
    name: str
    threads: int  # that torch's operators may use
    flushes_denormals: bool


class WorkerThread:
    """The thread of an OrderedWorker, which it does not keep alive.

    Args:
        group: What the jobs use; destroyed when the thread ends.
        name: The name of the thread.
        failure: Gets the first error of a job. Once it has one, no later job runs.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, failure: FirstError) -> None:
        self._name = name
        self._failure = failure
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()  # None: the end
        # Of the newest job, which holds it until it has run; a strong reference would keep its result alive.
        self._newest: Callable[[], torch.futures.Future[Any] | None] = lambda: None
        self._ended = False
        self._ending = threading.Lock()
        # torch's registry is the only owner of the group, so the group's end is ours. A weakref
        # callback may run anywhere, in the middle of submit too: it only puts, which is reentrant.
        self._group = weakref.ref(group, lambda _: self._jobs.put(None))
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, run: Callable[[dist.ProcessGroup], T], side: SideStream | None, name: str
    ) -> torch.futures.Future[T]:
        """Queue a job and return a future of its result.

        Raises:
            RuntimeError: This process is a fork, which has no such thread.
        """
        if self._is_gone_in_fork():
            raise RuntimeError(
                f"{self._name} has a thread in the process that this one was forked from, and none here: "
                "make a new one"
            )
        done, result = new_future(device_of(side))
        with self._ending:
            if not self._ended:
                self._newest = weakref.ref(done)
                self._jobs.put(_Job(run, done, side, name, torch.get_num_threads(), _flushes_denormals()))
                return result
        fail(done, self._failure.error or self._group_is_gone())
        return result

    def runs_this_thread(self) -> bool:
        """Return whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Return when the jobs that are queued have run.

        Raises:
            RuntimeError: This process was forked while jobs were queued.
        """
        if self.runs_this_thread():
            return  # it would wait for itself
        if self._is_gone_in_fork():
            newest = self._newest()
            if newest is not None and not newest.done():
                raise RuntimeError(f"this process was forked while jobs of {self._name} were queued")
            return
        reached = threading.Event()
        with self._ending:
            if self._ended:
                return
            self._jobs.put(reached)
        reached.wait()

    def end_group(self) -> None:
        """End the group after the job in progress: the worker has failed, and its peers must hear of it."""
        self.submit(lambda _: None, None, self._name)

    def stop(self) -> None:
        """End the thread after the jobs that are queued, and then its group."""
        self._jobs.put(None)
        if not self.runs_this_thread() and not self._is_gone_in_fork():
            self._thread.join(_STOP_SECONDS)

    def _is_gone_in_fork(self) -> bool:
        return os.getpid() != self._pid

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._handle(job)
            del job  # it may refer to the worker, which this must not keep alive while it waits
        with self._ending:
            self._ended = True
        while not self._jobs.empty():  # jobs queued between the end mark and the line above
            if (job := self._jobs.get()) is not None:
                self._handle(job)
        self._destroy_group()

    def _handle(self, job: _Job | threading.Event) -> None:
        if isinstance(job, threading.Event):  # somebody waits for the jobs queued before
            job.set()
            return
        try:
            if self._failure.error is None:
                self._run_in_group(job)
                return
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting rank must see it
            self._failure.keep(error)
            # Its frames would keep the group and its connections alive, and the future that holds the error.
            with contextlib.suppress(BaseException):  # the error's own methods may fail
                drop_frames(error)
        # Peers may wait in this job's collectives: closing our connections tells them.
        self._destroy_group()
        fail(job.done, self._failure.error or self._group_is_gone())

    def _run_in_group(self, job: _Job) -> None:
        if torch.get_num_threads() != job.threads:  # a setting of each thread
            torch.set_num_threads(job.threads)
        if _flushes_denormals() != job.flushes_denormals:  # likewise
            torch.set_flush_denormal(job.flushes_denormals)
        group = self._group()
        if group is None:
            raise self._group_is_gone()
        complete(job.done, job.run, group, job.side, job.name)

    def _group_is_gone(self) -> RuntimeError:
        return RuntimeError(f"the process group of {self._name} was destroyed")

    def _destroy_group(self) -> None:
        group = self._group()
        if group is not None and torch_compat.GROUPS_END_WITHOUT_GIL:  # else it ends with all the others
            # The main thread may be destroying every group just now, in any of torch's registries.
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)


def new_private_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a process group of the same ranks, which alone take part.

    ``new_group(use_local_synchronization=True)`` makes up the name from the number of groups that a rank
    has at the moment. Where that differs between ranks the new group hangs, and after a group was
    destroyed its name, and with it the addresses left in the store, are used again. torch 2.15 has fixed the
    first of the two. The public replacement would be that call; no version takes a name yet.

    Args:
        group: The group whose ranks, backends and timeout the new one has.
        name: The same on all ranks, and never used before in this job.

    Cost:
        Collective among the ranks: returns when they are connected. If one of them is gone, Gloo tries
        several times, each for the group's timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    kinds = {part.partition(":")[2] or part for part in backend.split(",")}
    if len(kinds) == 1:  # else it has no default backend, and warns about that at its end
        (backend,) = kinds
    timeout = torch_compat.group_timeout(group, torch.device("cpu")) or torch_compat.default_group_timeout()
    purpose = "groups of a worker's own"
    helper = torch_compat.private("torch.distributed.distributed_c10d", "_new_process_group_helper", purpose)
    world = torch_compat.private("torch.distributed.distributed_c10d", "_world", purpose)
    with store_connection() as store:
        new, _ = helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend(backend),
            store,
            name,
            timeout=timeout,
            group_desc=name,
        )
    world.pg_group_ranks[new] = {rank: index for index, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", new)


def await_connections(group: dist.ProcessGroup) -> None:
    """Wait, as the first job, until every rank is connected.

    Gloo returns the group to a rank as soon as that rank is. If its first job failed at once, which ends the
    group, connecting would fail on the others, which would not get to their own job's error.
    """
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=group)


_SUBNORMAL = 5e-324


def _flushes_denormals() -> bool:
    """Return whether arithmetic on this thread treats subnormal numbers as zero.

    ``torch.set_flush_denormal`` sets this for the thread that calls it; torch has no function that reads it.
    """
    return _SUBNORMAL * 1.0 == 0.0
