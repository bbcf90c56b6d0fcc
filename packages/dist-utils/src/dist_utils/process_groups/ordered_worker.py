"""Jobs that communicate, one at a time and in the same order on every rank, beside the caller."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.groups import GroupLike, resolve_group, runs_on_host
from dist_utils.process_groups.terms import require_same_terms

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["OrderedWorker"]

T = TypeVar("T")

_STOP_SECONDS = 5.0
"""How long closing waits for a job in progress. Its thread is a daemon, so the interpreter can exit."""


class OrderedWorker:
    """Run jobs of several collectives in submission order, without blocking the caller.

    A communication hook may need more than one collective per bucket. Issuing the second one from the
    completion callback of the first hangs or aborts on Gloo, because callbacks of several buckets run
    on two threads in any order. Here all collectives of a job run in one place, in one order:

    * On CPU tensors: one thread and one private process group, made for the first job. The private
      group keeps the jobs' collectives apart from those that DDP issues meanwhile on its own group.
    * On an accelerator whose backend enqueues its collectives, such as NCCL: nothing runs beside the
      caller. The job is enqueued at once on one side stream, on the group itself, without any host
      synchronization.
    * On an accelerator with Gloo, whose collectives block: on the thread as on CPU, with a side stream.

    Every rank of the group must submit the same jobs in the same order. The first error of a job is
    kept and given to all later ones, which do not run. It also ends the private group, so that the
    other ranks get an error soon rather than at their timeout.

    Before the first job the ranks compare the workers' names and ``terms`` (see
    :func:`dist_utils.require_same_terms`). If they differ, or a rank does not come, that is the first
    error, on every rank. A new worker, on every rank, is a fresh start after any error.

    Several threads may submit; which job is first is then up to them, and must be alike on all ranks.

    The thread ends on :meth:`close`, when the worker is garbage, at interpreter exit and on
    ``destroy_process_group``.

    Args:
        process_group: As in :func:`dist_utils.resolve_group`.
        name: Of the thread, for stack dumps; in the messages about ``terms``; and of jobs without a name.
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
        self._lane: _Lane | None = None
        self._streams: dict[torch.device, torch.Stream] = {}
        self._own_error: Exception | None = None  # of what does not run on the thread
        self._closed = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group the worker was made for (not the private one that CPU jobs get)."""
        return self._process_group

    @property
    def error(self) -> Exception | None:
        """The first error of a job, or ``None``. Once set, no later job runs."""
        return self._own_error if self._lane is None else self._lane.error or self._own_error

    def submit(
        self,
        job: Callable[[dist.ProcessGroup], T],
        *,
        device: torch.device | str = "cpu",
        name: str | None = None,
    ) -> torch.futures.Future[T]:
        """Queue ``job`` behind all jobs submitted before and return a future of its result.

        Args:
            job: Called with the process group it must use for every collective. On CPU, and with
                Gloo, it runs on the worker's thread; otherwise here and now, and must not synchronize
                with the host. On an accelerator the side stream is the current stream, which follows
                what the caller's stream has to do until now. Tensors it uses must live until its
                future is complete. Torch's operators use as many threads as on the caller's thread,
                and take subnormal numbers as they do there.
            device: Where the job's tensors live.
            name: What a profiler calls the job, on the thread where it runs; ``None``: as the worker. See
                :func:`dist_utils.torch_compat.every_thread`.

        Returns:
            A future that a DDP communication hook may return as it is. Waiting for it raises
            ``RuntimeError`` with the text of the job's error; :attr:`error` holds the error itself. What
            fails before the first job, such as an agreement, fails the future too.

        Raises:
            RuntimeError: The worker is closed.

        Cost:
            Before the first job, one exchange of ``terms`` through the store; the first CPU job makes a
            process group, which is collective among the members. Both wait for the other ranks, here.
        """
        device, name = torch.device(device), name or self._name
        side = None if device.type == "cpu" else self._side_stream(device)
        if side is not None and not runs_on_host(self._process_group, device):
            self._try(self.agree)
            return self._run_here(job, side, name)
        self._try(self._start_thread)
        return self._run_here(job, side, name) if self._lane is None else self._lane.submit(job, side, name)

    def agree(self) -> str:
        """Compare names and ``terms`` with the other ranks, if that was not done yet.

        For whoever wants to communicate beside the worker before the first job. Every rank must call it.

        Returns:
            A name of this worker: the same on all ranks, and of no other worker.

        Raises:
            AgreementError: They differ, or a rank does not come. It is the worker's first error then.
            RuntimeError: The worker is closed.
        """
        with self._starting:
            if self._closed:
                raise RuntimeError(f"{self._name} is closed")
            if self._own_error is not None:
                raise self._own_error
            if self._agreed is None:
                try:
                    terms, problem = self._own_terms()
                    self._agreed = require_same_terms(self._process_group, self._name, terms, problem=problem)
                except Exception as error:
                    self._own_error = error
                    raise
                self._terms = dict  # its owner may own this worker, and could not become garbage at once
            return self._agreed

    def _own_terms(self) -> tuple[Mapping[str, object], Exception | None]:
        """Return the terms, or why there are none, which the other ranks must hear of."""
        try:
            return self._terms(), None
        except Exception as error:  # noqa: BLE001 - whatever it is
            return {}, error

    def _start_thread(self) -> None:
        if self._lane is not None and not self._closed:
            return
        self.agree()
        with self._starting:
            if self._lane is None and self._agreed is not None:
                self._lane = _Lane(self._private_group(self._agreed), self._name)
                # At garbage collection and, as finalizers do, at interpreter exit.
                weakref.finalize(self, self._lane.stop)

    def _try(self, begin: Callable[[], object]) -> None:
        """Begin, or keep the error for this job and all later ones.

        Raised here it would leave DDP in the middle of a pass. That the worker is closed is the caller's.
        """
        try:
            begin()
        except Exception as error:
            if self._closed:
                raise
            self._own_error = self._own_error or error
            error.with_traceback(None)  # its frames would keep the caller's model alive

    def wait(self) -> None:
        """Return when every job submitted so far has run, whatever came out of it.

        On an accelerator whose backend enqueues its collectives there is nothing to wait for: the caller's
        stream is not made to wait either.
        """
        if self._lane is not None:
            self._lane.wait()

    def runs_this_thread(self) -> bool:
        """Return whether the caller is on the worker's thread: in a job, or in a callback of its future.

        Whoever waits for another job there waits for ever.
        """
        return self._lane is not None and self._lane.runs_this_thread()

    def close(self) -> None:
        """Finish the queued jobs, then end the thread and the private group; closing twice is harmless.

        On torch 2.6 the group ends with ``destroy_process_group``.

        Waits a few seconds at most: a job that hangs on a dead peer is left to its timeout.
        """
        with self._starting:
            self._closed = True
        if self._lane is not None:
            self._lane.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _private_group(self, name: str) -> dist.ProcessGroup:
        group = self._process_group
        return torch_compat.new_named_group(
            f"{group.group_name}/{self._name}/{name}",
            dist.get_process_group_ranks(group),
            backend=dist.get_backend_config(group),
            timeout=torch_compat.group_timeout(group, torch.device("cpu")),
        )

    def _side_stream(self, device: torch.device) -> _Side:
        """Return the side stream, and where the caller's stream is now."""
        accelerator: Any = torch.get_device_module(device)
        device = torch.empty(0, device=device).device  # with its index
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        return _Side(self._streams[device], accelerator.current_stream(device).record_event())

    def _run_here(
        self, job: Callable[[dist.ProcessGroup], T], side: _Side | None, name: str
    ) -> torch.futures.Future[T]:
        done: torch.futures.Future[T] = _new_future(side)
        result = done.then(_value)
        with _on(side):
            if self._own_error is None:
                try:
                    with torch_compat.profiler_range(name):
                        # The future records the side stream here; who waits for it makes its stream wait.
                        done.set_result(job(self._process_group))
                except Exception as error:  # noqa: BLE001 - whatever it is, backward() must raise it
                    self._own_error = error
            if self._own_error is not None:
                done.set_exception(self._own_error)  # type: ignore[arg-type] # torch's annotation
        return result


class _Side(NamedTuple):
    """Where a job on an accelerator is enqueued, and what must be over there before."""

    stream: torch.Stream
    before: Any  # an event of the accelerator's


class _Job(NamedTuple):
    run: Callable[[dist.ProcessGroup], Any]
    done: torch.futures.Future[Any]
    side: _Side | None
    name: str
    threads: int  # that torch's operators may use
    flushes_denormals: bool


class _Lane:
    """The thread of an OrderedWorker and what both share. Does not know the worker, which can be garbage."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.error: Exception | None = None
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | threading.Event | None] = queue.SimpleQueue()  # None: the end
        self._ended = False
        self._ending = threading.Lock()
        # torch's registry is the only owner of the group, so the group's end is ours. A weakref
        # callback may run anywhere, in the middle of submit too: it only puts, which is reentrant.
        self._group = weakref.ref(group, lambda _: self._jobs.put(None))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, run: Callable[[dist.ProcessGroup], T], side: _Side | None, name: str
    ) -> torch.futures.Future[T]:
        done: torch.futures.Future[T] = _new_future(side)
        result = done.then(_value)
        with self._ending:
            if not self._ended:
                self._jobs.put(
                    _Job(run, done, side, name, torch.get_num_threads(), torch_compat.flushes_denormals())
                )
                return result
        done.set_exception(self.error or self._group_is_gone())  # type: ignore[arg-type] # torch's annotation
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
            self._take(job)
            del job  # it may refer to the worker, which could not become garbage while this waits
        with self._ending:
            self._ended = True
        while not self._jobs.empty():  # what came between the end mark and the line above
            if (job := self._jobs.get()) is not None:
                self._take(job)
        self._destroy_group()

    def _take(self, job: _Job | threading.Event) -> None:
        if isinstance(job, threading.Event):  # somebody waits for what was queued before
            job.set()
            return
        with _on(job.side):
            self._settle(job)

    def _settle(self, job: _Job) -> None:
        if torch.get_num_threads() != job.threads:  # every thread has a number of its own
            torch.set_num_threads(job.threads)
        if torch_compat.flushes_denormals() != job.flushes_denormals:  # and a mode of its own
            torch.set_flush_denormal(job.flushes_denormals)
        try:
            result = self._run_in_group(job)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting rank must see it
            if self.error is None:
                self.error = error if isinstance(error, Exception) else RuntimeError(repr(error))
                # The peers wait in this job's collectives: closing our connections tells them. The
                # frames of the traceback would keep the group, and so the connections, alive.
                traceback.clear_frames(error.__traceback__)
                self._destroy_group()
            job.done.set_exception(self.error)
        else:
            job.done.set_result(result)

    def _run_in_group(self, job: _Job) -> Any:
        if self.error is not None:
            raise self.error
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


def _new_future(side: _Side | None) -> torch.futures.Future[Any]:
    return torch.futures.Future(devices=None if side is None else [side.stream.device])


def _on(side: _Side | None) -> contextlib.AbstractContextManager[object]:
    """Make the side stream the current one: a future records it when it gets its value."""
    if side is None:
        return contextlib.nullcontext()
    side.stream.wait_event(side.before)
    accelerator: Any = torch.get_device_module(side.stream.device)
    context: contextlib.AbstractContextManager[object] = accelerator.stream(side.stream)
    return context


def _value(done: torch.futures.Future[T]) -> T:
    # Raising here, in a callback, makes an error that C++ waiters such as DDP's reducer see too: a
    # future that set_exception has set directly looks to them like one with a strange result.
    return done.value()
