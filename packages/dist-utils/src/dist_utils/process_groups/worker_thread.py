"""The thread of an ordered worker and its private group: it runs jobs in order, and tells peers of errors."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from typing import Any, cast

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import FirstError
from dist_utils.process_groups.jobs import HOST, Job
from dist_utils.process_groups.store import ask_store, store_answers

_STOP_SECONDS = 5.0
"""How long stopping waits for a job in progress. The thread is a daemon, so the interpreter can exit."""

_FORGET_SECONDS = 1.0
"""How long the thread waits for the store as it ends: less than a stop, as the store may be out of reach."""


class WorkerThread:
    """The thread of an OrderedWorker, which it does not keep alive.

    Args:
        group: What the jobs use; destroyed when the thread ends.
        name: The name of the thread.
        failure: Gets the first error of a job. Once it has one, no later job runs.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, failure: FirstError) -> None:
        self._name = name
        self._address = f"{group.group_name}//cpu//0/{group.rank()}"
        self._failure = failure
        # An event for who waits for the jobs before it; None for the end.
        self._jobs: queue.SimpleQueue[Job[Any] | threading.Event | None] = queue.SimpleQueue()
        self._paused: deque[Job[Any]] = deque()  # jobs in parts, the oldest first
        self._ended = False
        self._ending = threading.RLock()  # a signal handler may wait for jobs in the middle of submit
        # torch's registry is the only owner of the group, so the group's end is ours. A weakref
        # callback may run anywhere, in the middle of submit too: it only puts, which is reentrant.
        self._group = weakref.ref(group, lambda _: self._jobs.put(None))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job[Any]) -> None:
        """Queue a job. It fails if the thread has ended, or if this process is a fork, which has none."""
        if not self._put(job):
            gone = f"the process group of {self._name} was destroyed"
            forked = f"{self._name} has a thread in the process that this one was forked from: make a new one"
            job.fail(self._failure.keep(RuntimeError(gone if self._ended else forked)))

    def runs_this_thread(self) -> bool:
        """Return whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Return when the jobs that are queued have run; at once in a fork of the thread's process."""
        reached = threading.Event()
        if not self.runs_this_thread() and self._put(reached):  # else it would wait for itself
            reached.wait()

    def end_group(self) -> None:
        """End the group after the job in progress: the worker has failed, and its peers must hear of it."""
        self.submit(Job(lambda _: None, HOST, self._name))

    def stop(self) -> None:
        """End the thread after the jobs that are queued, and then its group."""
        self._jobs.put(None)
        if not self.runs_this_thread():
            self._thread.join(_STOP_SECONDS)

    def _put(self, item: Job[Any] | threading.Event) -> bool:
        """Queue something, if the thread is there to take it; in a fork of its process it is not."""
        if not self._thread.is_alive():  # nobody may be there to release the lock either
            return False
        with self._ending:
            takes = not self._ended
            if takes:
                self._jobs.put(item)
        return takes

    def _run(self) -> None:
        while (job := self._next()) is not None:
            self._handle(job)
            del job  # it may refer to the worker, which this must not keep alive while it waits
        with self._ending:
            self._ended = True
        while not self._jobs.empty():  # jobs queued between the end mark and the line above
            if (job := self._jobs.get()) is not None:
                self._handle(job)
        self._finish_parts()
        self._destroy_group()
        if self._failure.error is None and store_answers():
            self._forget_address()

    def _next(self) -> Job[Any] | threading.Event | None:
        """Return what comes next: while nothing new is there, jobs in parts go on, the oldest one first."""
        while self._paused and self._jobs.empty():
            self._go_on()
        return self._jobs.get()

    def _finish_parts(self) -> None:
        while self._paused:
            self._go_on()

    def _go_on(self) -> None:
        """Let the oldest job in parts go on. It comes first whatever else waits: see ``submit_in_parts``."""
        if not self._run_job(self._paused[0]):
            self._paused.popleft()

    def _handle(self, job: Job[Any] | threading.Event) -> None:
        if isinstance(job, threading.Event) or not job.in_parts:
            self._finish_parts()
        if isinstance(job, threading.Event):
            job.set()
        elif self._run_job(job):
            self._paused.append(job)

    def _run_job(self, job: Job[Any]) -> bool:
        """Run a job until its end or its next pause; return whether it has paused."""
        # Operators use as many threads as set_num_threads has set last. Reading the number of the caller's
        # thread instead may set it there, and with it change the bits of later products.
        torch.init_num_threads()
        if (error := job.run(self._group(), self._failure)) is not None:
            # Peers may wait in this job's collectives: closing our connections tells them.
            self._destroy_group()
            job.fail(error)
        return job.paused

    def _destroy_group(self) -> None:
        group = self._group()
        if group is not None and torch_compat.GROUPS_END_WITHOUT_GIL:  # else it ends with all the others
            _destroy(group)

    def _forget_address(self) -> None:
        """Delete from the store where Gloo's peers have found this rank, which Gloo itself leaves there."""
        with contextlib.suppress(Exception):  # the store may be gone already
            ask_store(lambda store: store.delete_key(self._address), _FORGET_SECONDS)


def _destroy(group: dist.ProcessGroup) -> None:
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

    Raises:
        torch.distributed.DistError: The ranks are not connected after the group's timeout. Gloo may still
            try, on a thread of its own.

    Cost:
        Collective among the ranks: returns when they are connected.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    kinds = {part.partition(":")[2] or part for part in backend.split(",")}
    if len(kinds) == 1:  # else it has no default backend, and warns about that at its end
        (backend,) = kinds
    timeout = torch_compat.group_timeout(group, torch.device("cpu"))
    purpose = "groups of a worker's own"
    helper = torch_compat.private("torch.distributed.distributed_c10d", "_new_process_group_helper", purpose)
    world = torch_compat.private("torch.distributed.distributed_c10d", "_world", purpose)

    me = group.rank()
    del group  # a thread would keep it that waits for TCP

    def connect(store: Any) -> dist.ProcessGroup:
        new, _ = helper(
            len(ranks),
            me,
            ranks,
            dist.Backend(backend),
            store,
            name,
            timeout=timeout,
            group_desc=name,
        )
        world.pg_group_ranks[new] = {rank: index for index, rank in enumerate(ranks)}
        return cast("dist.ProcessGroup", new)

    return ask_store(connect, timeout.total_seconds(), _destroy)


def await_connections(group: dist.ProcessGroup) -> None:
    """Wait, as the first job, until every rank is connected.

    Gloo returns the group to a rank as soon as that rank is. If its first job failed at once, which ends the
    group, connecting would fail on the others, which would not get to their own job's error.
    """
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=group)
