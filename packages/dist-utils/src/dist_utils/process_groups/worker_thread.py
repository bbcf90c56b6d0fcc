"""The thread of an ordered worker: it takes jobs from a queue, and tells the peers if one fails."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.groups import timeout_seconds
from dist_utils.process_groups.kept_errors import drop_frames, same_error
from dist_utils.process_groups.side_stream import SideStream, current, fail, new_future
from dist_utils.process_groups.thread_starts import start_thread

__all__ = ["WorkerThread"]

T = TypeVar("T")

_STOP_SECONDS = 5.0
"""How long stopping waits for a job in progress. The thread is a daemon, so the interpreter can exit."""


class Job(NamedTuple):
    """A job for the thread, with the settings of the caller's thread."""

    run: Callable[[dist.ProcessGroup], Any]
    done: torch.futures.Future[Any]
    side: SideStream | None
    name: str
    threads: int  # that torch's operators may use
    flushes_denormals: bool


class WorkerThread:
    """The thread of an OrderedWorker and their shared state. Does not keep the worker alive.

    Args:
        group: What the jobs use; destroyed when the thread ends.
        name: The name of the thread.

    Raises:
        TimeoutError, RuntimeError, MemoryError: The thread does not begin.

    Attributes:
        error: The first error of a job. Once set, no later job runs.
    """

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.error: Exception | None = None
        self._name = name
        self._jobs: queue.SimpleQueue[Job | threading.Event | None] = queue.SimpleQueue()  # None: the end
        self._ended = False
        self._ending = threading.Lock()
        # torch's registry is the only owner of the group, so the group's end is ours. A weakref
        # callback may run anywhere, in the middle of submit too: it only puts, which is reentrant.
        self._group = weakref.ref(group, lambda _: self._jobs.put(None))
        try:
            self._thread = start_thread(self._run, name=name, seconds=timeout_seconds(group))
        except BaseException:
            self._destroy_group()  # which tells the peers
            raise

    def submit(
        self, run: Callable[[dist.ProcessGroup], T], side: SideStream | None, name: str
    ) -> torch.futures.Future[T]:
        """Queue a job and return a future of its result."""
        done, result = new_future(side)
        with self._ending:
            if not self._ended:
                self._jobs.put(
                    Job(run, done, side, name, torch.get_num_threads(), torch_compat.flushes_denormals())
                )
                return result
        fail(done, self.error or self._group_is_gone())
        return result

    def runs_this_thread(self) -> bool:
        """Return whether the caller is on the thread."""
        return threading.current_thread() is self._thread

    def wait(self) -> None:
        """Return when the jobs that are queued have run."""
        if self.runs_this_thread():
            return  # it would wait for itself
        reached = threading.Event()
        with self._ending:
            if self._ended:
                return
            self._jobs.put(reached)
        reached.wait()

    def stop(self) -> None:
        """End the thread after the jobs that are queued, and then its group."""
        self._jobs.put(None)
        if not self.runs_this_thread():
            self._thread.join(_STOP_SECONDS)

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

    def _handle(self, job: Job | threading.Event) -> None:
        if isinstance(job, threading.Event):  # somebody waits for the jobs queued before
            job.set()
            return
        with current(job.side):
            self._complete(job)

    def _complete(self, job: Job) -> None:
        if self.error is not None:  # raising it again would add this job's frames
            fail(job.done, self.error)
            return
        if torch.get_num_threads() != job.threads:  # a setting of each thread
            torch.set_num_threads(job.threads)
        if torch_compat.flushes_denormals() != job.flushes_denormals:  # likewise
            torch.set_flush_denormal(job.flushes_denormals)
        try:
            result = self._run_in_group(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting rank must see it
            # The peers wait in this job's collectives: closing our connections tells them. The frames of the
            # error would keep the group and its connections alive, and the future that holds the error.
            with contextlib.suppress(BaseException):  # the error's own methods may fail
                drop_frames(error)
            self._destroy_group()
            self.error = same_error(error)  # a copy: this thread lives as long as its owner
        else:
            job.done.set_result(result)
            return
        fail(job.done, self.error)  # not in the except block, where the job's error would become its context

    def _run_in_group(self, job: Job) -> Any:
        group = self._group()
        if group is None:
            raise self._group_is_gone()
        with torch_compat.profiler_range(job.name):
            return job.run(group)

    def _group_is_gone(self) -> RuntimeError:
        return RuntimeError(f"the process group of {self._name} was destroyed")

    def _destroy_group(self) -> None:
        group = self._group()
        if group is not None and torch_compat.GROUPS_END_WITHOUT_GIL:  # else it ends with all the others
            # The main thread may be destroying every group just now, in any of torch's registries.
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
