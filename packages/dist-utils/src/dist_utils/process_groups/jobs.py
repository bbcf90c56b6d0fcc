"""A job that communicates: where it runs, on the host or on an accelerator's side stream, and its future."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import FirstError, drop_frames, same_error, undo_raise
from dist_utils.process_groups.groups import runs_on_host

T = TypeVar("T")
Parts: TypeAlias = Generator[None, None, T]
"""What a job in parts is while it runs: it yields where it would wait, and returns its result."""
PartedJob: TypeAlias = Callable[[dist.ProcessGroup], Parts[T]]


_NOTHING: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


class JobStream(NamedTuple):
    """Where a job's work is enqueued: on the host, or on a side stream that waits for the caller's event."""

    device: torch.device
    stream: torch.Stream | None = None
    before: Any = None  # an event of the accelerator's

    def enter(self) -> contextlib.AbstractContextManager[object]:
        """Make the side stream the current one: a future records it when it gets its value."""
        if self.stream is None:
            return _NOTHING
        self.stream.wait_event(self.before)
        accelerator: Any = torch.get_device_module(self.device)
        context: contextlib.AbstractContextManager[object] = accelerator.stream(self.stream)
        return context


HOST = JobStream(torch.device("cpu"))


class SideStreams:
    """One stream for each device, made at first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def behind_caller(self, device: torch.device) -> JobStream:
        """Return a stream for a job that follows all work enqueued on the caller's stream; none on CPU."""
        if device.type == "cpu":
            return HOST
        accelerator: Any = torch.get_device_module(device)
        device = torch.empty(0, device=device).device  # with its index
        # Of two threads that make it at once, one wins.
        stream = self._streams.get(device) or self._streams.setdefault(device, accelerator.Stream(device))
        return JobStream(device, stream, accelerator.current_stream(device).record_event())

    def wait(self) -> None:
        """Make the caller's streams wait for what is enqueued so far. The host does not wait."""
        for device, stream in list(self._streams.items()):  # a job of another thread may add one
            accelerator: Any = torch.get_device_module(device)
            accelerator.current_stream(device).wait_stream(stream)


class InsideJob:
    """A context: a thread is inside a job of one worker, one at a time. Callbacks of its future are not."""

    def __init__(self) -> None:
        self._thread: int | None = None

    @property
    def now(self) -> bool:
        """Whether this thread is inside."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._thread = None


class Job(Generic[T]):
    """A job and the future of its result.

    Torch's operators treat subnormal numbers as on the thread that makes the job.

    Args:
        call: Called with the group that its collectives use.
        stream: What its work is enqueued on.
        name: What a profiler calls it.
        inside: Entered while it is called.
        in_parts: Whether the call returns a generator.

    Attributes:
        result: The future.
        in_parts: As given.
        paused: Whether a part has ended before the whole job.
    """

    result: torch.futures.Future[T]

    def __init__(
        self,
        call: Callable[[dist.ProcessGroup], T | Parts[T]],
        stream: JobStream,
        name: str,
        *,
        inside: contextlib.AbstractContextManager[object] = _NOTHING,
        in_parts: bool = False,
    ) -> None:
        self._call, self._stream, self._name, self._inside = call, stream, name, inside
        self._parts: Any = None
        self.in_parts, self.paused = in_parts, False
        self._flushes_denormals = _flushes_denormals()
        self._done, self.result = new_future(stream.device)

    def run(
        self,
        group: dist.ProcessGroup | None,
        failure: FirstError,
        catches: type[BaseException] = BaseException,
    ) -> Exception | None:
        """Run until a pause, or go on, unless there was an error before; at the end complete the future.

        Args:
            group: The group; ``None`` if it was destroyed.
            failure: Has the first error of all jobs, or gets it.
            catches: What counts as an error of the job; anything else is raised.

        Returns:
            The first error, to :meth:`fail` with; ``None`` if the job has run without one.
        """
        self.paused = False
        if failure.error is not None:
            return failure.error
        handled = sys.exc_info()[1]  # by who submits the job
        try:
            if group is None:
                raise RuntimeError(f"the process group of {self._name} was destroyed")
            if _flushes_denormals() != self._flushes_denormals:  # a setting of each thread
                torch.set_flush_denormal(self._flushes_denormals)
            with self._stream.enter():
                with torch_compat.profiler_range(self._name), self._inside:
                    result = self._go_on(group)
                if not self.paused:
                    self._done.set_result(result)
        except catches as error:
            first = failure.keep(error)
            # Its frames would keep the group and its connections alive, and the future that holds the error.
            drop_frames(error, handled)
            return first
        return None

    def fail(self, error: BaseException) -> None:
        """Complete the future with a copy of this error."""
        if self._parts is not None:
            self._parts.close()
        fail(self._done, error)

    def _go_on(self, group: dist.ProcessGroup) -> Any:
        """Do the next part, and note whether others follow; return the result if not."""
        if self._parts is None:
            result = self._call(group)
            if not self.in_parts:
                return result
            self._parts = result
        try:
            next(self._parts)
        except StopIteration as end:
            return end.value
        self.paused = True
        return None


def future_of_work(
    work: dist.Work, group: dist.ProcessGroup, device: torch.device
) -> torch.futures.Future[Any]:
    """Return the future of a collective on tensors of ``device``, for readers on any stream.

    Gloo's own futures know nothing of an accelerator's streams: in that case this waits until the collective
    is done, and makes a future that does.
    """
    own: torch.futures.Future[Any] = work.get_future()
    if device.type == "cpu" or not runs_on_host(group, device):
        return own
    work.wait()
    done = empty_future(device)
    done.set_result(own.wait())
    return done


def record_use(tensor: torch.Tensor) -> None:
    """Note that the current stream uses a tensor, whose memory may belong to another stream.

    Until this stream is done with it, the memory is not given to other tensors, whoever drops this one. Does
    nothing on CPUs.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))


def empty_future(device: torch.device) -> torch.futures.Future[Any]:
    """Return a future of what is on ``device``, to be completed."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def new_future(device: torch.device) -> tuple[torch.futures.Future[Any], torch.futures.Future[Any]]:
    """Return a future to complete, and one to hand out, whose errors C++ waiters see, too.

    The first one records the current stream, for which the stream of a waiter then waits.
    """
    done = empty_future(device)
    return done, done.then(_value)


def fail(done: torch.futures.Future[Any], error: BaseException) -> None:
    """Complete the first of a :func:`new_future` pair with a copy of this error."""
    held = same_error(error)
    done.set_exception(held)
    undo_raise(held)  # by callbacks, whose frames hold the future


def _value(done: torch.futures.Future[T]) -> T:
    # Raising here, in a callback, makes an error that C++ waiters such as DDP's reducer see too: a future
    # that set_exception has set directly looks to them like one with an unexpected result.
    return done.value()


_SUBNORMAL = 5e-324


def _flushes_denormals() -> bool:
    """Return whether arithmetic on this thread treats subnormal numbers as zero.

    ``torch.set_flush_denormal`` sets this for the thread that calls it; torch has no function that reads it.
    """
    return _SUBNORMAL * 1.0 == 0.0
