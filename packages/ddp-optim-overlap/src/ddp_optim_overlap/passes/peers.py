"""The meeting of all ranks after every pass: each learns whether the others have come as far as itself."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import CommunicationError, ConfigError, text_of
from ddp_optim_overlap.loop.gradient_watch import is_capturing
from ddp_optim_overlap.passes.averaging import numbers_on, start_all_reduce
from ddp_optim_overlap.passes.backward_pass import BackwardPass, PassKind
from dist_utils import OrderedWorker
from dist_utils.process_groups import runs_on_host

__all__ = ["Peers"]


class Peers:
    """Lets the ranks meet after every pass, and a pass wait until the last meeting is over.

    So no rank starts to average a pass while another one has failed in the pass before: their averages would
    be of different iterations. It costs no time: what the first average of a pass waits for is later than the
    end of the other ranks' last step.

    On CPUs a rank whose step failed has ended the worker's group, so that the meeting fails at once. On an
    accelerator its flag is in the meeting, which is enqueued on a stream of its own; when the next pass
    reads it, the accelerator has usually computed another forward pass since.

    Args:
        worker: Runs meetings on CPUs.
        name: The prefix of their ranges in a profiler.
    """

    def __init__(self, worker: OrderedWorker, name: str) -> None:
        self._worker = worker
        self._name = name
        self._streams: dict[torch.device, Any] = {}
        self._meeting: _Meeting | None = None

    def meet(self, number: int, current: BackwardPass, device: torch.device, *, failed: bool) -> None:
        """Start the meeting that follows the last bucket of a pass.

        Args:
            number: Of the pass, among all that have averaged.
            current: The pass.
            device: The device of its gradients.
            failed: Whether this rank has failed to step.
        """
        group = self._worker.process_group
        if group.size() == 1:
            return
        said = _Said(number, paused=current.kind is PassKind.PAUSED, failed=failed)
        if runs_on_host(group, device):
            job = partial(_meet_on_host, said, current)
            self._meeting = _HostMeeting(self._worker.submit(job, name=f"{self._name}:meet_peers"))
            return
        if not is_capturing():
            self._meeting = _DeviceMeeting(said, group, device, self._streams, current)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every rank has come to the last meeting, or one has failed.

        Args:
            timeout: In seconds; ``None`` for as long as the process group allows.

        Raises:
            TimeoutError: A peer has not come in time.
            CommunicationError: Another rank has failed. On CPUs the worker has the error instead.
            ConfigError: Ranks are in different passes.
        """
        if self._meeting is not None and not is_capturing():
            self._meeting.wait(timeout)


class _Said(NamedTuple):
    """What a rank says in a meeting."""

    number: int
    paused: bool
    failed: bool

    def values(self) -> list[int]:
        """Return numbers whose maxima over all ranks tell whether all have said the same."""
        return [self.number, -self.number, self.paused, -self.paused, self.failed]

    def judge(self, largest: list[int], current: BackwardPass) -> None:
        """Raise if another rank has said something else.

        Args:
            largest: The maxima over all ranks.
            current: This rank's pass.
        """
        newest, oldest, paused, not_paused, failed = largest
        if newest != -oldest or paused != -not_paused:
            raise ConfigError(
                "ranks are in different backward passes, or some are in handle.pause() and others are not: "
                "call pause() and remove() on every rank"
            )
        if failed:
            raise CommunicationError("another rank failed in this step", current.report())


class _Meeting(Protocol):
    def wait(self, timeout: float | None) -> None: ...


class _HostMeeting:
    """A meeting that is a job of the worker, which keeps its error."""

    def __init__(self, met: torch.futures.Future[None]) -> None:
        self._met = met

    def wait(self, timeout: float | None) -> None:
        if self._met.done():
            return
        done = threading.Event()
        self._met.add_done_callback(lambda _: done.set())
        if not done.wait(timeout):
            raise TimeoutError(f"a peer has not finished its step within {timeout:g} s")


def _meet_on_host(said: _Said, current: BackwardPass, group: dist.ProcessGroup) -> None:
    values = numbers_on(torch.device("cpu"), said.values())
    try:
        start_all_reduce(values, group, dist.ReduceOp.MAX).wait()
    except Exception as error:
        raise CommunicationError(
            f"another rank failed in this step: {text_of(error)}", current.report()
        ) from error
    said.judge(values.tolist(), current)


class _DeviceMeeting:
    """A meeting on an accelerator, whose host waits only when it is asked."""

    def __init__(
        self,
        said: _Said,
        group: dist.ProcessGroup,
        device: torch.device,
        streams: dict[torch.device, Any],
        current: BackwardPass,
    ) -> None:
        self._said, self._current = said, current
        accelerator: Any = torch.get_device_module(device)
        stream = streams.get(device) or streams.setdefault(device, accelerator.Stream(device))
        with accelerator.stream(stream):
            values = numbers_on(device, said.values())
            start_all_reduce(values, group, dist.ReduceOp.MAX).wait()  # only the stream waits
            self._largest = values.to("cpu", non_blocking=True)
            self._copied = stream.record_event()

    def wait(self, timeout: float | None) -> None:
        del timeout  # the process group's own watches over collectives on accelerators
        self._copied.synchronize()
        self._said.judge(self._largest.tolist(), self._current)
