"""Run jobs that communicate, one at a time, in the same order on all ranks, without blocking the caller."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.failed_waits import earlier_failed_wait, note_failed_wait
from dist_utils.process_groups.groups import GroupLike, resolve_group, runs_on_host, timeout_seconds
from dist_utils.process_groups.kept_errors import drop_frames, same_error
from dist_utils.process_groups.side_stream import SideStream, SideStreams, current, fail, new_future
from dist_utils.process_groups.store_requests import StoreRequests
from dist_utils.process_groups.terms import AgreementError, error_text, require_same_terms
from dist_utils.process_groups.worker_thread import WorkerThread

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OrderedWorker"]

T = TypeVar("T")

_MORE_SECONDS = 2.0
"""How much longer than its timeout a group may take to be made: its own error, at the timeout, says more."""


class OrderedWorker:
    """Run jobs of several collectives in submission order, without blocking the caller.

    A communication hook may need more than one collective per bucket. Issuing the second one from the
    completion callback of the first hangs or aborts on Gloo, because callbacks of several buckets run
    on two threads in any order. Here all collectives of a job run on one thread or stream, in one order:

    * On CPU tensors: one thread and one private process group, made for the first job. The private
      group keeps the jobs' collectives apart from those that DDP issues meanwhile on its own group.
    * On an accelerator whose backend enqueues its collectives, such as NCCL: nothing runs concurrently with
      the caller. The job is enqueued at once on one side stream, on the group itself, without any host
      synchronization.
    * On an accelerator with Gloo, whose collectives block: on the thread as on CPU, with a side stream.

    Every rank of the group must submit the same jobs in the same order. The first error of a job is kept and
    given to all later jobs, which do not run. It also ends the private group, so that the other ranks get an
    error soon and not only at their timeout.

    Before the first job the ranks compare the workers' names and ``terms`` (see
    :func:`dist_utils.require_same_terms`). If they differ, or a rank does not take part, that is the first
    error, on every rank. After an error, make a new worker on every rank.

    Several threads may submit; which job is first is then up to them, and must be identical on all ranks.

    The thread ends on :meth:`close`, when the worker is garbage collected, at interpreter exit and on
    ``destroy_process_group``.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        name: The name of the thread in stack dumps, of the worker in messages about ``terms``, and of jobs
            without a name.
        terms: Returns what must be equal on all ranks, by name. Called before the first job.

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
    ) -> None:
        self._process_group = resolve_group(process_group)
        self._name = name
        self._terms = terms
        self._starting = threading.Lock()
        self._agreed: str | None = None
        self._thread: WorkerThread | None = None
        self._side_streams = SideStreams()
        self._own_error: Exception | None = None  # of jobs that do not run on the thread
        self._thread_error: Exception | None = None  # a copy of the thread's
        self._closed = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the worker was made for (not the private one that CPU jobs get)."""
        return self._process_group

    @property
    def error(self) -> Exception | None:
        """The first error of a job or a copy of it, or ``None``. Once set, no later job runs.

        For jobs on the thread, the traceback keeps its lines but not its frames: they would keep the private
        group alive, and its end is what tells the peers.
        """
        if self._thread is not None and self._thread.error is not None and self._thread_error is None:
            # A copy, because a caller that raises it adds frames that may hold this worker, and the thread
            # would hold those.
            self._thread_error = same_error(self._thread.error)
        return self._own_error if self._thread_error is None else self._thread_error

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
                the caller's stream. Tensors it uses must live until its future is complete. Torch's operators
                use as many threads as on the caller's thread, and treat subnormal numbers in the same way.
            device: Where the job's tensors live.
            name: What a profiler calls the job, on the thread where it runs; ``None``: the worker's name. See
                :func:`dist_utils.torch_compat.every_thread`.

        Returns:
            A future that a DDP communication hook may return as it is. Waiting for it raises ``RuntimeError``
            with the text of the job's error; :attr:`error` holds a copy of the job's error. An error before
            the first job, such as a failed comparison of terms, also fails the future.

        Raises:
            RuntimeError: The worker is closed.

        Cost:
            Before the first job, one exchange of ``terms`` through the store; the first CPU job makes a
            process group, which is collective among the members. Both wait for the other ranks in this call.
            With Gloo, one all-reduce of 4 bytes follows on the thread.
        """
        device, name = torch.device(device), name or self._name
        side = self._side_streams.behind_caller(device)
        if side is not None and not runs_on_host(self._process_group, device):
            self._try(self.agree)
        else:
            self._try(self._start_thread)
            if self._thread is not None:
                return self._thread.submit(job, side, name)
        return self._run_here(job, side, name)

    def agree(self) -> str:
        """Compare names and ``terms`` with the other ranks, if that has not been done yet.

        For callers that communicate outside the worker before its first job. Every rank must call it.

        Returns:
            A name that is identical on all ranks and that no other worker has.

        Raises:
            AgreementError: They differ, or a rank does not take part. It is then the worker's first error.
            RuntimeError: The worker is closed.
        """
        with self._starting:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._own_error is not None:
                raise same_error(self._own_error)
            if self._agreed is None:
                try:
                    terms, problem = self._own_terms()
                    self._agreed = require_same_terms(self._process_group, self._name, terms, problem=problem)
                except Exception as error:
                    self._keep(error)
                    raise
                self._terms = dict  # it may hold the worker's owner, a cycle
            return self._agreed

    def _own_terms(self) -> tuple[Mapping[str, object], Exception | None]:
        """Return the terms, or the error that prevented them, for the other ranks."""
        try:
            return self._terms(), None
        except Exception as error:  # noqa: BLE001 - whatever it is
            return {}, error

    def _keep(self, error: BaseException) -> None:
        """Keep a copy as the first error: raising adds frames, which hold the caller's model."""
        self._own_error = same_error(error)
        drop_frames(self._own_error, clear=False)

    def _start_thread(self) -> None:
        if self._thread is not None and not self._closed:
            return
        name = self.agree()
        with self._starting:
            if self._thread is None and self._own_error is None:
                thread = None
                try:
                    thread = WorkerThread(self._private_group(name), self._name)
                    # At garbage collection and, as finalizers do, at interpreter exit.
                    weakref.finalize(self, thread.stop)
                    thread.submit(_await_connections, None, f"{self._name}:connect")
                    self._thread = thread  # not before: a job of another thread must not come first
                except BaseException as error:  # an interrupt, too: the name must not be used again
                    if thread is not None:
                        thread.stop()
                    self._keep(error)
                    raise
        if self._closed:  # meanwhile
            self.close()
            raise RuntimeError(f"{self._name} is closed")

    def _try(self, begin: Callable[[], object]) -> None:
        """Call ``begin``, and keep its error for this job and all later ones.

        An error raised here would leave DDP in the middle of a pass. Only the error of a closed worker is
        raised.
        """
        try:
            begin()
        except Exception as error:
            if self._closed:
                raise
            self._own_error = error if self._own_error is None else self._own_error
            drop_frames(error)  # they would keep the caller's model alive

    def wait(self) -> None:
        """Return when every job submitted so far has run, with or without an error.

        On an accelerator whose backend enqueues its collectives there is nothing to wait for: the caller's
        stream is not made to wait either.
        """
        if self._thread is not None:
            self._thread.wait()

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _private_group(self, name: str) -> dist.ProcessGroup:
        group = self._process_group
        ranks = dist.get_process_group_ranks(group)
        if earlier := earlier_failed_wait(ranks):
            raise AgreementError(f"{self._name}: {earlier}")
        backend = dist.get_backend_config(group)
        make = functools.partial(
            torch_compat.new_named_group,
            f"{group.group_name}/{self._name}/{name}",
            ranks,
            backend=backend,
            timeout=torch_compat.group_timeout(group, torch.device("cpu")),
        )
        try:
            if all(part.endswith("gloo") for part in backend.split(",")):
                return _made_in_time(make, timeout_seconds(group) + _MORE_SECONDS)
            return make()
        except Exception as error:
            note_failed_wait({*ranks} - {dist.get_rank()}, f"{self._name}: {error_text(error)}")
            raise

    def _run_here(
        self, job: Callable[[dist.ProcessGroup], T], side: SideStream | None, name: str
    ) -> torch.futures.Future[T]:
        done, result = new_future(side)
        with current(side):
            if self._own_error is None:
                try:
                    with torch_compat.profiler_range(name):
                        # The future records the side stream here, for which the stream of a waiter then
                        # waits.
                        done.set_result(job(self._process_group))
                except Exception as error:  # noqa: BLE001 - whatever it is, backward() must raise it
                    drop_frames(error)  # this frame holds the future, which will hold a copy of the error
                    self._own_error = error
            if self._own_error is not None:
                fail(done, self._own_error)
        return result


def _made_in_time(make: Callable[[], dist.ProcessGroup], seconds: float) -> dist.ProcessGroup:
    """Make a group on a thread of its own; raises ``TimeoutError`` if that takes too long.

    A group that is made after that, or after an interrupt of the caller's wait, is destroyed.

    Gloo tries five times to connect to a rank that has given up, each time for the whole timeout; and a new
    connection to a store that is cut off takes minutes to fail.
    """
    turn, made = threading.Lock(), list[dist.ProcessGroup]()

    def drop() -> None:
        group = made.pop()
        if torch_compat.GROUPS_END_WITHOUT_GIL:  # else it ends with all the others
            dist.destroy_process_group(group)

    def make_or_drop(store: Any) -> None:
        del store
        made.append(make())
        if not turn.acquire(blocking=False):  # the caller has given up
            drop()

    with StoreRequests(torch_compat.default_store(), seconds) as requests:
        try:
            requests.ask(make_or_drop)
        except TimeoutError:
            if turn.acquire(blocking=False):
                raise TimeoutError(f"the ranks were not connected within {seconds:g} s") from None
        except BaseException:
            if not turn.acquire(blocking=False):  # interrupted when it was made
                drop()
            raise
    return made.pop()


def _await_connections(group: dist.ProcessGroup) -> None:
    """Wait, as the first job, until every rank is connected.

    Gloo returns the group to a rank as soon as that rank is. If its first job failed at once, which ends the
    group, connecting would fail on the others, which would not get to their own job's error.
    """
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=group)
