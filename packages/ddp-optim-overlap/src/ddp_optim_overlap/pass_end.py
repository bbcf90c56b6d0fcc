"""The end of a backward pass: whole steps, and the point where ranks learn of each other's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ddp_optim_overlap.averaging import start_all_reduce
from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.errors import CommunicationError, OverlapError, StepError, text_of
from ddp_optim_overlap.failed_futures import raise_error
from ddp_optim_overlap.first_error import FirstError
from ddp_optim_overlap.whole_step import WholeStep
from dist_utils import OrderedWorker
from dist_utils.torch_compat import after_backward

__all__ = ["PassEnd"]


class PassEnd:
    """Ends backward passes that have handed over all their buckets.

    Args:
        worker: Lets the ranks meet once they have stepped.
        name: The prefix of its jobs' ranges in a profiler.
        failure: Records the first error.
        whole: Steps everything at the end; ``None`` if buckets are stepped.
    """

    def __init__(
        self, worker: OrderedWorker, name: str, failure: FirstError, whole: WholeStep | None
    ) -> None:
        self._worker: OrderedWorker | None = worker
        self._name = name
        self._failure = failure
        self._whole = whole
        self._meeting: torch.futures.Future[None] | None = None

    def forget_worker(self) -> None:
        """Let ranks no longer meet from now on."""
        self._worker = None

    def follow_last_bucket(
        self, current: BackwardPass, device: torch.device, then: Callable[[BackwardPass], None]
    ) -> None:
        """Do what follows the last bucket; some of it must wait for DDP until ``backward()`` ends.

        Args:
            current: The backward pass.
            device: The device of its gradients.
            then: Called with the pass, if it steps, once it has succeeded.
        """
        if current.steps:
            after_backward(partial(self._finish, current, device, then))
        averages = [] if self._whole is None else self._whole.take_averages()
        if averages and self._worker is not None and device.type == "cpu":
            # Its error ends the group: peers notice.
            self._worker.submit(partial(_wait_for_all, averages), name=f"{self._name}:averages")
        if not current.steps or self._whole is None:
            self._meet_peers(current, device)

    def wait_for_peers(self, timeout: float | None) -> None:
        """Wait until every rank has got this far, or one has failed.

        Raises:
            TimeoutError: A peer has not got this far in time.
        """
        if self._meeting is None:
            return
        done = threading.Event()
        self._meeting.add_done_callback(lambda _: done.set())
        if not done.wait(timeout):
            raise TimeoutError(f"a peer has not finished its step within {timeout:g} s")

    def _finish(
        self, current: BackwardPass, device: torch.device, then: Callable[[BackwardPass], None]
    ) -> None:
        current.end()
        if current.canceled:  # torch cannot tell the end of a nested pass from the end of all
            raise self._keep(
                StepError(
                    "step() or wait() was called while backward() ran, whose rest is not stepped",
                    current.report(),
                ),
                device,
            )
        if self._whole is not None:
            self._step_whole(self._whole, current, device)
            self._meet_peers(current, device)
        then(current)

    def _step_whole(self, whole: WholeStep, current: BackwardPass, device: torch.device) -> None:
        try:
            whole.step(current, device)
        except StepError as error:
            failure = self._keep(error, device)
            cause = error.__cause__
            if cause is not None and not isinstance(cause, Exception):  # an interrupt, or an exit
                raise cause from None
            raise failure from failure.__cause__
        whole.keep_contents()

    def _keep(self, error: StepError, device: torch.device) -> OverlapError:
        """Return the first error: this one, unless there was one before. Notify the peers."""
        failure = self._failure.keep(error)
        # On an accelerator the peers do not wait, and a job would make only this rank create a group.
        if self._worker is not None and device.type == "cpu":
            self._worker.submit(partial(raise_error, failure))  # notifies the peers
        return failure

    def _meet_peers(self, current: BackwardPass, device: torch.device) -> None:
        if self._worker is not None and device.type == "cpu":
            job, name = partial(_meet_peers, current), f"{self._name}:meet_peers"
            self._meeting = self._worker.submit(job, name=name)


def _wait_for_all(averages: Sequence[torch.futures.Future[torch.Tensor]], _: dist.ProcessGroup) -> None:
    """Wait for these averages, as a job."""
    for average in averages:
        average.wait()


def _meet_peers(current: BackwardPass, group: dist.ProcessGroup) -> None:
    """Wait, as a job, until every rank has stepped. A rank whose step failed has ended this group."""
    if group.size() == 1:
        return
    try:
        start_all_reduce(torch.zeros(1, dtype=torch.float32), group).wait()
    except Exception as error:
        raise CommunicationError(
            f"another rank failed in this step: {text_of(error)}", current.report()
        ) from error
