"""What ranks tell each other about a pass besides gradients: which parameters were used, and how it ended."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import CommunicationError, ConfigError, OverlapError
from ddp_optim_overlap.passes.averaging import completes_within, start_all_reduce
from ddp_optim_overlap.passes.bucket import Bucket
from ddp_optim_overlap.passes.gradient_watch import is_capturing
from dist_utils import OrderedWorker
from dist_utils.process_groups import error_text, runs_on_host
from dist_utils.torch_compat import MissingTorchFeatureError, private

NAME = "ddp-optim-overlap"
"""The name of the worker, and the prefix of its jobs' ranges in a profiler."""

_Answer = Callable[[float | None], list[int]]
"""Waits for integers from all ranks, some seconds or as long as the process group allows."""


class Peers:
    """Lets the ranks meet after every pass, and a pass wait until the last meeting is over.

    So no rank starts to average a pass while another one has failed in the pass before: their averages would
    be of different iterations. It costs no time: what the first average of a pass waits for is later than the
    end of the other ranks' last step.

    On CPUs the ranks meet in the worker's private group. A rank that has failed has ended it, so that the
    others need not wait for it. On an accelerator a flag in the meeting tells of a failure. The meeting is
    enqueued on a stream of its own; when the next pass reads it, the accelerator has usually computed another
    forward pass since.

    Args:
        worker: Has the private group, and ends it with an error.

    Attributes:
        on_host: Whether the collectives of the newest pass run on the host.
    """

    def __init__(self, worker: OrderedWorker) -> None:
        self._worker = worker
        self._private: weakref.ref[dist.ProcessGroup] | None = None
        self._streams: dict[torch.device, Any] = {}
        self._device, self.on_host = torch.device("cpu"), True
        self._meeting: _Answer | None = None
        # A thread of Gloo that drops a tensor last needs the interpreter, for which torch 2.6 waits while it
        # destroys a group, and with it that thread.
        self._kept: torch.Tensor | None = None

    def connect(self, device: torch.device) -> None:
        """Connect the ranks, if that is still to be done, before a pass that begins on this device.

        Raises:
            CommunicationError: A rank has not come, or the process group was destroyed.
        """
        group, self._device = self._worker.process_group, device
        self.on_host = runs_on_host(group, device)
        if group.size() > 1 and self.on_host:
            self._private_group()

    def share_used(self, buckets: Sequence[Bucket]) -> Callable[[], None]:
        """Find out which parameters of some buckets got a gradient on any rank.

        Returns:
            Waits for the answer, and sets it in the buckets. All ranks share the same buckets together.
        """
        group, device = self._worker.process_group, buckets[0].buffer.device
        flags = [flag for bucket in buckets for flag in bucket.used or ()]
        if not flags or group.size() == 1:
            return lambda: None
        answer = self._start_maximum(flags, device)

        def finish() -> None:
            # Reading it waits for an accelerator, so only where the answer is open.
            is_open = not all(flags) or runs_on_host(group, device)
            anywhere = iter(answer(None) if is_open else flags)
            for bucket in buckets:
                bucket.used = [bool(next(anywhere)) for _ in bucket.used or ()]

        return finish

    def meet(self, number: int, *, paused: bool, failed: bool) -> None:
        """Start the meeting that follows the last bucket of a pass.

        Args:
            number: Of the pass, among all that have averaged.
            paused: Whether it only averages, in ``handle.pause()``.
            failed: Whether this rank has failed in it.
        """
        if self._worker.process_group.size() == 1 or is_capturing() or (failed and self.on_host):
            return
        # Maxima over the ranks tell whether all are equal.
        self._meeting = self._start_maximum([number, -number, paused, -paused, failed], self._device)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every rank has come to the last meeting, or one has failed.

        Args:
            timeout: In seconds; ``None`` for as long as the process group allows.

        Raises:
            TimeoutError: A peer has not come in time.
            CommunicationError: Another rank has failed.
            ConfigError: Ranks are in different passes.
        """
        if self._meeting is None or is_capturing():
            return
        newest, oldest, paused, not_paused, failed = self._meeting(timeout)
        if newest != -oldest or paused != -not_paused:
            raise ConfigError(
                "ranks are in different backward passes, or some are in handle.pause() and others are not: "
                "call pause() and remove() on every rank"
            )
        if failed:
            raise CommunicationError("another rank failed in this step")
        self._meeting = None

    def fail(self, error: OverlapError) -> None:
        """Keep the first error, and let the peers hear of one: the private group ends."""
        self._meeting = None  # what waits for it would keep the connections
        self._worker.fail(error)

    def _start_maximum(self, numbers: Sequence[int], device: torch.device) -> _Answer:
        """Start to find the maxima of integers over the ranks, for a pass with gradients on this device.

        Raises:
            CommunicationError: The group has failed.
        """
        group = self._worker.process_group
        if runs_on_host(group, device):
            values = self._kept = torch.tensor(numbers, dtype=torch.int64, device="cpu")
            own_group, record = self._private_group(), _switch_of_recording()
            with _errors_of_peers():
                record(False)
                try:
                    work = start_all_reduce(values, own_group, dist.ReduceOp.MAX)
                finally:
                    record(True)
            return functools.partial(_await_on_host, work, values)
        accelerator: Any = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        stream = self._streams[device]
        with accelerator.stream(stream), _errors_of_peers():
            # A copy to an accelerator from memory that is not pinned would wait.
            given = torch.tensor(numbers, dtype=torch.int64, device="cpu", pin_memory=True)
            values = given.to(device, non_blocking=True)
            start_all_reduce(values, group, dist.ReduceOp.MAX).wait()  # only the stream waits
            largest = values.to("cpu", non_blocking=True)
            copied = stream.record_event()

        def finish(_: float | None) -> list[int]:  # the process group's own timeout watches over it
            copied.synchronize()
            return largest.tolist()

        return finish

    def _private_group(self) -> dist.ProcessGroup:
        """Return the worker's private group, which this does not keep alive: its end tells the peers.

        Raises:
            CommunicationError: It has ended.
        """
        if self._private is None:
            try:
                self._private = self._worker.submit(weakref.ref).wait()
            except Exception as error:
                raise CommunicationError(f"the ranks have not connected: {error_text(error)}") from error
        group = self._private()
        if group is None:
            raise CommunicationError(f"the process group of {NAME} was destroyed")
        return group


def _await_on_host(work: dist.Work, values: torch.Tensor, timeout: float | None) -> list[int]:
    if timeout is not None and not completes_within(work.is_completed, timeout):
        raise TimeoutError(f"a peer has not finished its step within {timeout:g} s")
    with _errors_of_peers():
        work.wait()
    return values.tolist()


@functools.cache
def _switch_of_recording() -> Callable[[bool], object]:
    """Return what hides this thread from profilers, or does nothing; no public name for it up to torch 2.15.

    A meeting may end after the profiler that has seen its beginning, and Gloo's thread would write the time
    of its end into freed memory. Afterwards the thread is recorded: torch does not say whether it was.
    """
    switch: Callable[[bool], object] = bool
    with contextlib.suppress(MissingTorchFeatureError):
        switch = private("torch.autograd", "_enable_record_function", "meetings beside a profiler")
    return switch


@contextlib.contextmanager
def _errors_of_peers() -> Iterator[None]:
    """Raise what torch raises, if a peer has ended the group or is gone, as a CommunicationError."""
    try:
        yield
    except Exception as error:
        text = f"another rank failed in this step, or has called remove() alone: {error_text(error)}"
        raise CommunicationError(text) from error
