"""The end of a backward pass: what is stepped only then, and where the ranks learn of each other's errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.errors import CommunicationError, OverlapError, StepError, text_of
from ddp_optim_overlap.failed_futures import raise_error
from ddp_optim_overlap.first_error import FirstError
from ddp_optim_overlap.whole_step import WholeStep
from dist_utils import OrderedWorker
from dist_utils.torch_compat import after_backward, start_all_reduce

__all__ = ["PassEnd"]


class PassEnd:
    """Ends backward passes that have handed over all their buckets.

    Args:
        worker: Lets the ranks meet when it has stepped.
        name: What a profiler's ranges of its jobs begin with.
        failure: Keeps the first error.
        whole: Steps at the end, if anything does.
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
        """Make no ranks meet from now on."""
        self._worker = None

    def follow_last_bucket(
        self, current: BackwardPass, device: torch.device, then: Callable[[BackwardPass], None]
    ) -> None:
        """Do what comes after the last bucket; what has to wait for DDP, when ``backward()`` ends.

        Args:
            current: The backward pass.
            device: The device of its gradients.
            then: Called with the pass if it steps, when it has ended well.
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
        """Return when every rank has come as far, or one has failed.

        Raises:
            TimeoutError: A peer has not.
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
        if current.canceled:  # torch does not tell the end of a nested pass from the end of all
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
            raise failure from cause
        whole.keep_contents()

    def _keep(self, error: StepError, device: torch.device) -> OverlapError:
        """Return the first error: this one, unless there was one before; and tell the peers."""
        failure = self._failure.keep(error)
        # On an accelerator the peers do not wait, and a job would make this rank alone make a group.
        if self._worker is not None and device.type == "cpu":
            self._worker.submit(partial(raise_error, failure))  # which tells the peers
        return failure

    def _meet_peers(self, current: BackwardPass, device: torch.device) -> None:
        if self._worker is not None and device.type == "cpu":
            job, name = partial(_meet_peers, current), f"{self._name}:meet_peers"
            self._meeting = self._worker.submit(job, name=name)


def _wait_for_all(averages: Sequence[torch.futures.Future[torch.Tensor]], _: dist.ProcessGroup) -> None:
    """Be a job that ends when these averages are there."""
    for average in averages:
        average.wait()


def _meet_peers(current: BackwardPass, group: dist.ProcessGroup) -> None:
    """Be a job that ends when every rank has stepped. One whose step failed has ended this group instead."""
    if group.size() == 1:
        return
    try:
        start_all_reduce(torch.zeros(1, dtype=torch.float32), group).wait()
    except Exception as error:
        raise CommunicationError(
            f"another rank failed in this step: {text_of(error)}", current.report()
        ) from error
