"""The meeting of all ranks after every pass: each learns whether the others have come as far as itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import CommunicationError, ConfigError
from ddp_optim_overlap.passes.averaging import numbers_on, start_all_reduce
from ddp_optim_overlap.passes.backward_pass import NAME, BackwardPass, PassKind
from ddp_optim_overlap.passes.gradient_watch import is_capturing
from dist_utils import OrderedWorker
from dist_utils.process_groups import error_text, runs_on_host


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
    """

    def __init__(self, worker: OrderedWorker) -> None:
        self._worker = worker
        self._streams: dict[torch.device, Any] = {}
        self._await_meeting: Callable[[float | None], None] | None = None

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
        paused = current.kind is PassKind.PAUSED
        claim = [number, -number, paused, -paused, failed]  # maxima over the ranks tell whether all are equal
        if runs_on_host(group, device):
            job = partial(_meet_on_host, claim, current)
            met = self._worker.submit(job, name=f"{NAME}:meet_peers")
            self._await_meeting = partial(_await_job, met)
        elif not is_capturing():
            self._await_meeting = self._meet_on_device(claim, current, device)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every rank has come to the last meeting, or one has failed.

        Args:
            timeout: In seconds; ``None`` for as long as the process group allows.

        Raises:
            TimeoutError: A peer has not come in time.
            CommunicationError: Another rank has failed. On CPUs the worker has the error instead.
            ConfigError: Ranks are in different passes.
        """
        if self._await_meeting is not None and not is_capturing():
            self._await_meeting(timeout)

    def _meet_on_device(
        self, claim: list[int], current: BackwardPass, device: torch.device
    ) -> Callable[[float | None], None]:
        """Meet on an accelerator, whose host waits only when it is asked."""
        accelerator: Any = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        stream = self._streams[device]
        with accelerator.stream(stream):
            values = numbers_on(device, claim)
            # Only the stream waits.
            start_all_reduce(values, self._worker.process_group, dist.ReduceOp.MAX).wait()
            largest = values.to("cpu", non_blocking=True)
            copied = stream.record_event()

        def wait(_: float | None) -> None:  # the process group's own timeout watches over it
            copied.synchronize()
            _require_equal(largest.tolist(), current)

        return wait


def _meet_on_host(claim: list[int], current: BackwardPass, group: dist.ProcessGroup) -> torch.Tensor:
    """Meet on the worker's thread.

    Returns:
        The numbers, which the job's future thereby holds until the next meeting. Otherwise a thread of Gloo
        may be the last to drop them, and needs the interpreter for that; torch 2.6 does not let go of it
        while it destroys a group, and waits for that thread.
    """
    values = numbers_on(torch.device("cpu"), claim)
    try:
        start_all_reduce(values, group, dist.ReduceOp.MAX).wait()
    except Exception as error:
        raise CommunicationError(
            f"another rank failed in this step: {error_text(error)}", current.report()
        ) from error
    _require_equal(values.tolist(), current)
    return values


def _require_equal(largest: list[int], current: BackwardPass) -> None:
    """Raise if another rank has failed or is in another pass, by the maxima of all ranks' claims."""
    newest, oldest, paused, not_paused, failed = largest
    if newest != -oldest or paused != -not_paused:
        raise ConfigError(
            "ranks are in different backward passes, or some are in handle.pause() and others are not: call "
            "pause() and remove() on every rank"
        )
    if failed:
        raise CommunicationError("another rank failed in this step", current.report())


def _await_job(met: torch.futures.Future[torch.Tensor], timeout: float | None) -> None:
    """Wait for a job of the worker, which keeps its error."""
    if met.done():
        return
    done = threading.Event()
    met.add_done_callback(lambda _: done.set())
    if not done.wait(timeout):
        raise TimeoutError(f"a peer has not finished its step within {timeout:g} s")
