"""Where a job runs and completes, on the host or on a side stream of an accelerator; and its future."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.process_groups.errors import same_error

T = TypeVar("T")


class SideStream(NamedTuple):
    """Where a job on an accelerator is enqueued, and the event that it must wait for."""

    stream: torch.Stream
    before: Any  # an event of the accelerator's


class SideStreams:
    """One stream for each device, made at first use."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def behind_caller(self, device: torch.device) -> SideStream | None:
        """Return the stream for a job that follows all work enqueued on the caller's stream; none on CPU."""
        if device.type == "cpu":
            return None
        accelerator: Any = torch.get_device_module(device)
        device = torch.empty(0, device=device).device  # with its index
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        return SideStream(self._streams[device], accelerator.current_stream(device).record_event())

    def wait(self) -> None:
        """Make the caller's streams wait for what is enqueued so far. The host does not wait."""
        for device, stream in self._streams.items():
            accelerator: Any = torch.get_device_module(device)
            accelerator.current_stream(device).wait_stream(stream)


def current(side: SideStream | None) -> contextlib.AbstractContextManager[object]:
    """Make the side stream the current one: a future records it when it gets its value."""
    if side is None:
        return contextlib.nullcontext()
    side.stream.wait_event(side.before)
    accelerator: Any = torch.get_device_module(side.stream.device)
    context: contextlib.AbstractContextManager[object] = accelerator.stream(side.stream)
    return context


def device_of(side: SideStream | None) -> torch.device:
    """Return where the results of a job are: on its side stream's device, or on the CPU."""
    return torch.device("cpu") if side is None else side.stream.device


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
    """Return a future to complete, and one to hand out, whose errors C++ waiters see, too."""
    done = empty_future(device)
    return done, done.then(_value)


def complete(
    done: torch.futures.Future[T],
    job: Callable[[dist.ProcessGroup], T],
    group: dist.ProcessGroup,
    side: SideStream | None,
    name: str,
) -> None:
    """Run a job and complete its future; raises what the job raises.

    Args:
        done: The first of a :func:`new_future` pair. It records the side stream, for which the stream of a
            waiter then waits.
        job: Called with the group.
        group: What its collectives use.
        side: Where it runs.
        name: What a profiler calls it.
    """
    with current(side):
        with torch_compat.profiler_range(name):
            result = job(group)
        done.set_result(result)


def fail(done: torch.futures.Future[Any], error: BaseException) -> None:
    """Complete the first of a :func:`new_future` pair with a copy of this error."""
    held = same_error(error)
    done.set_exception(held)
    # The callbacks have raised it by now, and their frames hold the future.
    held.__traceback__ = held.__context__ = None


def _value(done: torch.futures.Future[T]) -> T:
    # Raising here, in a callback, makes an error that C++ waiters such as DDP's reducer see too: a future
    # that set_exception has set directly looks to them like one with an unexpected result.
    return done.value()
