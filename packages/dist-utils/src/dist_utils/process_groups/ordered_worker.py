"""Run jobs that communicate, one at a time, in the same order on all ranks, without blocking the caller."""

from __future__ import annotations

import hashlib
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from dist_utils.process_groups.agreement import KnownTerms, Verdict, compare
from dist_utils.process_groups.errors import FirstError, drop_frames, same_error
from dist_utils.process_groups.groups import GroupLike, group_behind, resolve_group, runs_on_host
from dist_utils.process_groups.jobs import HOST, InsideJob, Job, PartedJob, Parts, SideStreams
from dist_utils.process_groups.worker_thread import WorkerThread, await_connections, new_private_group

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")


class OrderedWorker:
    """Run jobs of several collectives in submission order, without blocking the caller.

    A communication hook may need more than one collective per bucket. Issuing the second one from the
    completion callback of the first hangs or aborts on Gloo, because callbacks of several buckets run
    on two threads in any order. Here all collectives of a job run on one thread or stream, in one order:

    * On CPU tensors: one thread and one private process group, made for the first job. The private
      group keeps the jobs' collectives apart from those that DDP issues meanwhile on its own group.
    * On an accelerator whose backend enqueues its collectives, such as NCCL: nothing runs concurrently with
      the caller. The job is enqueued at once on one side stream, on the group itself, without any host
      synchronization. Another thread that submits meanwhile waits until all of it is enqueued.
    * On an accelerator with Gloo, whose collectives block: on the thread as on CPU, with a side stream.

    Every rank of the group must submit the same jobs in the same order. The first error is kept and given to
    all later jobs, which do not run. It also ends the private group, so that the other ranks get an error
    soon and not only at their timeout. After an error, make a new worker on every rank.

    Before the first job the ranks compare the workers' names and ``terms`` (see
    :func:`dist_utils.require_same_terms`), and later on what :meth:`require_same_terms` is given. If they
    differ, or a rank does not take part, that is the first
    error, on every rank.

    Several threads may submit; which job is first is then up to them, and must be identical on all ranks. A
    job may not submit to its own worker, where it could only wait for itself; a callback of its future may.

    The thread ends on :meth:`close`, when the worker is garbage collected, at interpreter exit and on
    ``destroy_process_group``; a worker does not keep its group alive. A process that is forked from this one
    has no such thread: make a new worker there.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        name: The name of the thread in stack dumps, of the worker in messages about ``terms``, and of jobs
            without a name.
        terms: Returns what must be equal on all ranks, by name. Called before the first job.
        note: Returns a text for the other ranks, which need not be equal: see :meth:`notes`. Called likewise.

    Raises:
        ValueError, TypeError, RuntimeError: As :func:`dist_utils.resolve_group`.

    Example:
        >>> worker = OrderedWorker()  # doctest: +SKIP
        >>> def sum_twice(group):  # doctest: +SKIP
        ...     dist.all_reduce(tensor, group=group)
        ...     dist.all_reduce(tensor, group=group)
        ...     return tensor
        >>> worker.submit(sum_twice, device=tensor.device).wait()  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        name: str = "OrderedWorker",
        terms: Callable[[], Mapping[str, object]] = dict,
        note: Callable[[], str] = str,
    ) -> None:
        self._group = weakref.ref(resolve_group(process_group))
        self._name = name
        self._terms, self._note = terms, note
        self._starting = threading.RLock()
        self._failure = FirstError()
        self._agreed: Verdict | None = None
        self._known = KnownTerms()
        self._thread: WorkerThread | None = None
        self._side_streams = SideStreams()
        self._enqueuing = threading.Lock()
        self._inside = InsideJob()
        self._closed = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the worker was made for (not the private one that CPU jobs get).

        Raises:
            ValueError: It was destroyed.
        """
        return group_behind(self._group)

    def serves(self, group: dist.ProcessGroup) -> bool:
        """Return whether the worker was made for this group."""
        return self._group() is group

    @property
    def error(self) -> Exception | None:
        """A new copy of the first error, or ``None``. Once set, no later job runs.

        Its cause has the traceback as text. The frames themselves would keep the private group alive, and its
        end is what tells the peers.
        """
        return None if self._failure.error is None else same_error(self._failure.error)

    def submit(
        self,
        job: Callable[[dist.ProcessGroup], T],
        *,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> torch.futures.Future[T]:
        """Queue ``job`` after all jobs submitted before and return a future of its result.

        Args:
            job: Called with the process group it must use for every collective. On CPU, and with Gloo, it
                runs on the worker's thread; otherwise in this call, and must not synchronize with the host.
                On an accelerator the side stream is the current stream, which waits for all earlier work of
                the caller's stream; it must return what it has written, or the streams of those who wait for
                its future do not wait for the side stream. Tensors it uses must live until its future is
                complete. Torch's operators use as many threads as ``torch.set_num_threads`` has set last, and
                treat subnormal numbers as on the caller's thread.
            device: Where the job's tensors live.
            name: What a profiler calls the job, on the thread where it runs; ``None``: the worker's name. See
                :func:`dist_utils.torch_compat.every_thread`.

        Returns:
            A future that a DDP communication hook may return as it is. Waiting for it raises ``RuntimeError``
            with the text of the job's error; :attr:`error` holds a copy of the job's error. An error before
            the first job, such as a failed comparison of terms, also fails the future, and so does a fork of
            the process in which the worker was used.

        Raises:
            RuntimeError: The worker is closed, or this is called in one of its jobs.

        Cost:
            Before the first job, one exchange of ``terms`` through the store; the first CPU job makes a
            process group, which is collective among the members. Both wait for the other ranks in this call.
            With Gloo, one all-reduce of 4 bytes follows on the thread.
        """
        return self._submit(job, device, name, in_parts=False)

    def submit_in_parts(
        self,
        job: PartedJob[T],
        *,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> torch.futures.Future[T]:
        """Do as :meth:`submit`, with a job that lets later ones begin while it would wait for other ranks.

        The job is a generator function, which yields where it would wait. If other jobs in parts are there
        already, they begin meanwhile; then the oldest one goes on. So jobs in parts begin in the order in
        which they were submitted, and end in it, but how their parts alternate differs between ranks: they
        may only send messages of their own, which no other job of this worker takes for its own
        (:func:`dist_utils.start_messages` with a ``tag``), and must not call collectives. Any other job, and
        :meth:`wait`, comes after all parts of those before. Where nothing runs concurrently with the caller,
        a job is not interrupted.

        Args:
            job: As for :meth:`submit`; what it returns is the result.
            device: As for :meth:`submit`.
            name: As for :meth:`submit`.

        Returns:
            As :meth:`submit`.

        Raises:
            RuntimeError: As :meth:`submit`.

        Example:
            >>> def exchange(group):  # doctest: +SKIP
            ...     sends, receives = [(1, own)], [(1, theirs)]
            ...     works = start_messages(group, receives=receives, sends=sends, tag=number)
            ...     yield
            ...     for work in works:
            ...         work.wait()
            ...     return theirs
            >>> worker.submit_in_parts(exchange).wait()  # doctest: +SKIP
        """
        return self._submit(job, device, name, in_parts=True)

    def _submit(
        self,
        job: Callable[[dist.ProcessGroup], T | Parts[T]],
        device: torch.device | str,
        name: str | None,
        *,
        in_parts: bool,
    ) -> torch.futures.Future[T]:
        if self._inside.now:
            raise RuntimeError(f"a job of {self._name} submits another one, which would wait for it")
        stream = self._side_streams.behind_caller(torch.device(device))
        queued: Job[T] = Job(job, stream, name or self._name, inside=self._inside, in_parts=in_parts)
        handled = sys.exc_info()[1]  # by the caller
        try:
            if stream is HOST or runs_on_host(self.process_group, stream.device):
                self._thread_for_jobs().submit(queued)
            else:
                self.agree()
                self._enqueue(queued)
        except Exception as error:
            if self._closed or self._failure.error is None:
                raise
            drop_frames(error, handled)  # they would keep the caller's model alive
            # Raised here, it would leave DDP in the middle of a pass, so the future has it.
            queued.fail(self._failure.error)
        return queued.result

    def _enqueue(self, queued: Job[T]) -> None:
        """Run a job in the caller's thread, as a whole before those of other threads."""
        with self._enqueuing:
            failed = queued.run(self.process_group, self._failure, Exception)
            while queued.paused:
                failed = queued.run(self.process_group, self._failure, Exception)
        if failed is not None:
            self._side_streams.wait()  # nobody else waits for what the job has enqueued
            queued.fail(failed)

    def agree(self) -> str:
        """Compare names and ``terms`` with the other ranks, if that has not been done yet.

        For callers that communicate outside the worker before its first job. Every rank must call it.

        Returns:
            A name that is identical on all ranks and that no other worker has.

        Raises:
            AgreementError: They differ, or a rank does not take part. It is then the worker's first error.
            RuntimeError: The worker is closed.
        """
        return self._agreement().name

    def _agreement(self) -> Verdict:
        with self._starting:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if (earlier := self.error) is not None:
                raise earlier
            if self._agreed is None:
                try:
                    self._agreed = compare(
                        self.process_group, self._name, self._terms, lambda: f"{_this_host()} {self._note()}"
                    )
                except BaseException as error:  # an interrupt, too: the other ranks are told of it
                    self._failure.keep(error)
                    raise
                self._terms, self._note = dict, str  # they may hold the worker's owner, a cycle
            return self._agreed

    def hosts(self) -> list[int]:
        """Return for each rank of the group the number of its host; hosts are numbered as they first appear.

        Ranks share a host if they have its name, boot and network namespace in common. They tell each other
        when they :meth:`agree`, which this does if need be: every rank must call it.
        """
        found = [told.partition(" ")[0] for told in self._agreement().notes]
        numbers = {host: number for number, host in enumerate(dict.fromkeys(found))}
        return [numbers[host] for host in found]

    def notes(self) -> list[str]:
        """Return what ``note`` returned on each rank of the group, told like :meth:`hosts`."""
        return [told.partition(" ")[2] for told in self._agreement().notes]

    def require_same_terms(
        self, title: str, terms: Mapping[str, object], *, about: object | None = None
    ) -> None:
        """Return if all ranks call with the same title and terms, or raise on all ranks.

        What ranks have agreed on is not compared again. A refusal is the worker's first error, and ends its
        private group: ranks no longer know which of them has come how far, and another comparison could take
        a late rank for one that is ahead. See :func:`dist_utils.comm_hooks.require_same_bucket` for buckets.

        Args:
            title: As for :func:`dist_utils.require_same_terms`.
            terms: Likewise.
            about: An object: what is known about it is forgotten with it, and nothing is known about another.

        Raises:
            AgreementError: The terms differ, or a rank does not take part; now or earlier.
        """
        self.agree()
        try:
            self._known.require(self.process_group, title, terms, about)
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Keep this as the first error, and end the private group, so that its peers hear of it.

        There is none before the first job, nor with NCCL: peers that wait for this rank then get an error at
        their timeout.
        """
        self._failure.keep(error)
        if self._thread is not None:
            self._thread.end_group()

    def _thread_for_jobs(self) -> WorkerThread:
        """Return the thread, which is started for the first job."""
        if self._thread is None:  # else without the lock, which nobody releases in a fork
            with self._starting:
                name = self.agree()
                if self._thread is None:
                    self._thread = self._start_thread(name)
        if self._closed:  # meanwhile
            self.close()
            raise RuntimeError(f"{self._name} is closed")
        return self._thread

    def _start_thread(self, name: str) -> WorkerThread:
        try:
            whole = self.process_group
            group = new_private_group(whole, f"{whole.group_name}/{self._name}/{name}")
            thread = WorkerThread(group, self._name, self._failure)
            del group  # its end is the thread's
            # At garbage collection and, as finalizers do, at interpreter exit.
            weakref.finalize(self, thread.stop)
            thread.submit(Job(await_connections, HOST, f"{self._name}:connect"))
        except BaseException as error:  # an interrupt, too: the name must not be used again
            self._failure.keep(error)
            raise
        return thread

    def wait(self) -> None:
        """Return when every job submitted so far has run, with or without an error.

        On an accelerator the caller's current stream waits, and not the host, for what is enqueued on the
        worker's stream.

        A fork of this process has no jobs to wait for: wait before a fork that saves what jobs write.
        """
        if self._thread is not None:
            self._thread.wait()
        self._side_streams.wait()

    def runs_this_thread(self) -> bool:
        """Return whether the caller is on the worker's thread: in a job, or in a callback of its future.

        Waiting for another job there would never end.
        """
        return self._thread is not None and self._thread.runs_this_thread()

    def close(self) -> None:
        """Finish the queued jobs, then end the thread and the private group; closing twice is harmless.

        On torch 2.6 the group ends with ``destroy_process_group``.

        Waits a few seconds at most: a job that hangs on a dead peer is left to its timeout, and so is another
        thread that waits for the other ranks with the first job. May be called in a signal handler.
        """
        self._closed = True  # without the lock: a signal handler may interrupt the thread that holds it
        if self._thread is not None:
            self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _this_host() -> str:
    """Return what ranks on one host have in common: its name, its boot, and their network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        network = Path("/proc/self/ns/net").readlink()
    except OSError:  # not Linux
        boot, network = "", Path()
    return hashlib.sha256(f"{socket.gethostname()} {boot} {network}".encode()).hexdigest()[:16]
