"""The thread of an ordered worker: it takes jobs from a queue, and tells the peers if one fails."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import drop_frames, same_error
from dist_utils.process_groups.side_stream import SideStream, current, fail, new_future

__all__ = ["FirstError", "WorkerThread"]

T = TypeVar("T")

_STOP_SECONDS = 5.0
"""How long stopping waits for a job in progress. The thread is a daemon, so the interpreter can exit."""


class FirstError:
    """The first error of a worker: a copy without frames, which would keep the caller's model alive."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def keep(self, error: BaseException) -> Exception:
        """Keep an error, unless there is one already, and return the one that is kept."""
        if self.error is None:
            self.error = same_error(error)
        return self.error


class _Job(NamedTuple):
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
        failure: Gets the first error of a job. Once it has one, no later job runs.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, failure: FirstError) -> None:
        self._name = name
        self._failure = failure
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()  # None: the end
        self._unfinished = 0
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
        done, result = new_future(side)
        with self._ending:
            if not self._ended:
                self._unfinished += 1
                self._jobs.put(
                    _Job(run, done, side, name, torch.get_num_threads(), torch_compat.flushes_denormals())
                )
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
            if self._unfinished:
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
        with current(job.side):
            result = self._try(job) if self._failure.error is None else None
            with self._ending:
                self._unfinished -= 1
            if self._failure.error is None:
                job.done.set_result(result)
            else:
                # Peers may wait in this job's collectives: closing our connections tells them.
                self._destroy_group()
                fail(job.done, self._failure.error)

    def _try(self, job: _Job) -> Any:
        """Run a job, and keep its error."""
        if torch.get_num_threads() != job.threads:  # a setting of each thread
            torch.set_num_threads(job.threads)
        if torch_compat.flushes_denormals() != job.flushes_denormals:  # likewise
            torch.set_flush_denormal(job.flushes_denormals)
        try:
            return self._run_in_group(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting rank must see it
            self._failure.keep(error)
            # Its frames would keep the group and its connections alive, and the future that holds the error.
            with contextlib.suppress(BaseException):  # the error's own methods may fail
                drop_frames(error)
        return None

    def _run_in_group(self, job: _Job) -> Any:
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
