"""The queue of buckets from the thread of ``backward()`` to the worker that steps them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.errors import StepError, not_averaged
from ddp_optim_overlap.handed_over import HandedOver
from dist_utils import OrderedWorker
from dist_utils.torch_compat import (
    before_end_of_backward,
    in_final_callback,
    inside_backward,
    inside_nested_backward,
)

__all__ = ["WORTH_A_STEP", "BucketQueue"]

WORTH_A_STEP = 4 * 2**20
"""Stepping this many bytes of gradients takes longer than waking the worker."""

_WORTH_A_CALL = 2**20
"""Stepping this many bytes of gradients takes longer than calling the optimizer."""


class BucketQueue:
    """Lets a worker step averaged buckets in their order, small ones together.

    Waking the worker and calling an optimizer takes as long as stepping some MiB. So the thread of
    ``backward()`` announces buckets to the worker when there are enough of them, and the last bucket of a
    pass, whose step nothing hides, by itself. The worker steps the announced buckets, and any others that
    are ready by then.

    Only the thread of ``backward()`` announces; only the worker takes buckets out. Every bucket is completed
    once, by whichever thread comes first.

    Args:
        step: Steps averaged buckets; returns the tensors that DDP is to take for their averages.
        name: The prefix of a profiler's ranges.
        worth_a_step: Bytes of gradients that are gathered before a step; 0: no bucket waits for another one.
    """

    def __init__(
        self,
        step: Callable[[BackwardPass, Sequence[HandedOver]], list[torch.Tensor]],
        name: str,
        worth_a_step: int,
    ) -> None:
        self._step = step
        self._name = name
        self._worth_a_step = worth_a_step
        self._waits = False
        self._waiting: deque[HandedOver] = deque()
        self._unannounced: deque[HandedOver] = deque()
        self._unannounced_bytes = 0
        self._newest_job: torch.futures.Future[Any] | None = None

    def begin(self, worker: OrderedWorker, current: BackwardPass) -> None:
        """Begin a backward pass, in the hook of its first bucket."""
        self.forget()
        # A pass without a last bucket announces the rest before DDP waits for it. A nested pass, or one in a
        # final callback, may end differently, so no bucket waits there.
        self._waits = inside_backward() and not in_final_callback() and not inside_nested_backward()
        if self._waits:
            before_end_of_backward(partial(self._announce, worker, current))

    def forget(self) -> None:
        """Discard what an earlier pass left behind because it failed."""
        self.give_up(StepError("the backward pass of this bucket has failed"))
        self._waiting = deque()
        self._newest_job = None

    def take(
        self, worker: OrderedWorker, current: BackwardPass, bucket: HandedOver, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future for DDP that completes when the bucket's parameters are stepped.

        In a pass that releases gradients, waits while too many buckets are in progress.

        Args:
            worker: Steps on its thread or, on an accelerator, on its stream.
            current: The backward pass.
            bucket: Its next bucket.
            last: Whether this is its last bucket.
        """
        device = bucket.gradients.buffer.device
        if device.type == "cpu":
            done = self._append(worker, current, bucket, last=last)
        else:
            job = partial(self._step_one, current, bucket)
            name = f"{self._name}:bucket_{bucket.index}"
            self._newest_job = done = worker.submit(job, device=device, name=name)
        if current.released is not None:
            current.released.limit_backward(done, device)
        return done

    def give_up(self, error: Exception) -> None:
        """Fail the buckets that were not announced to the worker, because DDP waits for each of them."""
        while self._unannounced:
            self._unannounced.popleft().fail(error)
        self._unannounced_bytes = 0

    def wait(self) -> None:
        """Wait for the announced steps; on an accelerator, make its stream wait."""
        if self._newest_job is not None:
            with contextlib.suppress(Exception):
                self._newest_job.wait()

    def finish(self) -> None:
        """Clean up after a successful backward pass."""
        self._newest_job = None  # on an accelerator it holds a bucket, which DDP may be about to replace

    def _append(
        self, worker: OrderedWorker, current: BackwardPass, bucket: HandedOver, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        done = bucket.done.then(_value)
        if last:
            self._announce(worker, current)
        self._waiting.append(bucket)
        self._unannounced.append(bucket)
        self._unannounced_bytes += bucket.nbytes
        self._forget_taken()
        if last or not self._waits or self._unannounced_bytes >= self._worth_a_step:
            self._announce(worker, current)
        return done

    def _forget_taken(self) -> None:
        """Drop the buckets, the oldest ones, that the worker took although they were not announced."""
        while self._unannounced and self._unannounced[0].taken:
            self._unannounced_bytes -= self._unannounced.popleft().nbytes

    def _announce(self, worker: OrderedWorker, current: BackwardPass) -> None:
        """Let the worker step the waiting buckets."""
        self._forget_taken()
        buckets = list(self._unannounced)
        self._unannounced.clear()
        self._unannounced_bytes = 0
        if not buckets:
            return
        job = partial(self._step_until, current, self._waiting, buckets)
        self._newest_job = worker.submit(job, name=f"{self._name}:bucket_{buckets[-1].index}")
        # Not before the worker knows the error: when backward() raises, step() looks for it there.
        self._newest_job.add_done_callback(partial(_fail_with, buckets))

    def _step_one(self, current: BackwardPass, bucket: HandedOver, group: dist.ProcessGroup) -> torch.Tensor:
        self._await(current, bucket, group)
        (average,) = self._step(current, [bucket])
        return average

    def _step_until(
        self,
        current: BackwardPass,
        waiting: deque[HandedOver],
        buckets: list[HandedOver],
        group: dist.ProcessGroup,
    ) -> None:
        """Wait for averages and step with them.

        Args:
            current: The backward pass.
            waiting: The buckets of the pass that no job has taken.
            buckets: The announced buckets. Others that are ready by then are stepped too, and added here.
            group: The worker's group.
        """
        newest = buckets[-1]
        told_of_more = not newest.taken
        while told_of_more:
            together: list[HandedOver] = []
            nbytes = 0
            while told_of_more or _is_ready(waiting):
                if nbytes >= _WORTH_A_CALL and not _is_ready(waiting):
                    break  # the wait for the next average hides this step
                bucket = waiting.popleft()
                bucket.taken = True
                if not told_of_more:
                    buckets.append(bucket)
                told_of_more = told_of_more and bucket is not newest
                together.append(bucket)
                nbytes += bucket.nbytes
                self._await(current, bucket, group)
                if nbytes >= self._worth_a_step:
                    break
            for bucket, average in zip(together, self._step(current, together), strict=True):
                bucket.complete(average)

    def _await(self, current: BackwardPass, bucket: HandedOver, group: dist.ProcessGroup) -> None:
        try:
            if bucket.reduced.done():
                bucket.reduced.value()  # raises if it failed: a rank that did not come will not come here
            if bucket.used is not None:
                bucket.used = _used_anywhere(bucket.used, group, bucket.gradients.buffer.device)
            bucket.gradients.write(current.await_bucket(bucket.reduced))
        except Exception as error:
            raise not_averaged(bucket.index, error, current.report()) from error


def _used_anywhere(used: list[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Return which parameters of a bucket got a gradient on some rank."""
    pin = _is_accelerator(device)  # a copy from other memory would wait for the device
    anywhere = torch.tensor(used, dtype=torch.int32, pin_memory=pin).to(device, non_blocking=pin)
    if group.size() > 1:
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    # Reading it waits for the device, so only where the answer is open.
    return used if all(used) else [bool(value) for value in anywhere.tolist()]


def _is_ready(waiting: deque[HandedOver]) -> bool:
    """Whether the next bucket can be stepped without waiting for its average or for another rank."""
    return bool(waiting) and waiting[0].used is None and waiting[0].reduced.done()


def _fail_with(buckets: Sequence[HandedOver], stepped: torch.futures.Future[None]) -> None:
    """Give the error of a job to the buckets that it has not stepped."""
    try:
        stepped.value()
    except Exception as error:  # noqa: BLE001 - backward() must raise any error
        for bucket in buckets:
            bucket.fail(error)


def _value(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    # Only an error raised in a callback, as here, reaches C++ waiters such as DDP's reducer.
    return done.value()


def _is_accelerator(device: torch.device) -> bool:
    """Return whether a device is of the machine's kind of accelerator.

    torch 2.6 raises when asked for the current accelerator where there is none.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator is not None and accelerator.type == device.type
