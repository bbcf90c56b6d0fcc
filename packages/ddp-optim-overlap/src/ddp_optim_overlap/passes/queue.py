"""The queue of buckets from the thread of ``backward()`` to the worker that steps them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import OverlapError, StepError
from ddp_optim_overlap.passes.backward_pass import BackwardPass
from ddp_optim_overlap.passes.bucket import Bucket
from ddp_optim_overlap.phase import OverlapState
from dist_utils import OrderedWorker

__all__ = ["WORTH_A_STEP", "BucketQueue"]

WORTH_A_STEP = 4 * 2**20
"""Stepping this many bytes of gradients takes longer than waking the worker."""

_WORTH_A_CALL = 2**20
"""Stepping this many bytes of gradients takes longer than calling the optimizer."""

_MOST_SECONDS = 5.0
"""How long averages of a failed pass are waited for: some hooks never complete them."""


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
        state: Keeps the first error.
        name: The prefix of a profiler's ranges.
        gathers: Whether buckets wait for others until a step is worth it.
    """

    def __init__(
        self,
        step: Callable[[BackwardPass, Sequence[Bucket]], list[torch.Tensor]],
        state: OverlapState,
        name: str,
        *,
        gathers: bool,
    ) -> None:
        self._step = step
        self._state = state
        self._name = name
        self._worth_a_step = WORTH_A_STEP if gathers else 0
        self._waits = False
        self._buckets: list[Bucket] = []
        """All buckets of the pass, which fail together."""
        self._waiting: deque[Bucket] = deque()
        self._unannounced: deque[Bucket] = deque()
        self._unannounced_bytes = 0
        self._newest_job: torch.futures.Future[Any] | None = None

    def begin(self, *, waits: bool) -> None:
        """Begin a backward pass, in the hook of its first bucket.

        Args:
            waits: Whether a bucket may wait for others: :meth:`announce` will be called at the end.
        """
        self._waits = waits
        self._buckets = []
        self._waiting = deque()

    def take(
        self, worker: OrderedWorker, current: BackwardPass, bucket: Bucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future for DDP that completes when the bucket's parameters are stepped.

        Args:
            worker: Steps on its thread or, on an accelerator, on its stream.
            current: The backward pass.
            bucket: Its next bucket.
            last: Whether this is its last bucket.
        """
        device = bucket.gradients.buffer.device
        if device.type != "cpu":
            job = partial(self._step_one, current, bucket)
            name = f"{self._name}:bucket_{bucket.index}"
            self._newest_job = done = worker.submit(job, device=device, name=name)
            return done
        done = bucket.done.then(_value)
        if last:
            self.announce(worker, current)
        self._buckets.append(bucket)
        self._waiting.append(bucket)
        self._unannounced.append(bucket)
        self._unannounced_bytes += bucket.nbytes
        self._forget_taken()
        if last or not self._waits or self._unannounced_bytes >= self._worth_a_step:
            self.announce(worker, current)
        return done

    def announce(self, worker: OrderedWorker, current: BackwardPass) -> None:
        """Let the worker step the buckets that wait for others."""
        self._forget_taken()
        if not self._unannounced:
            return
        newest = self._unannounced[-1]
        self._unannounced.clear()
        self._unannounced_bytes = 0
        job = partial(self._step_until, current, self._waiting, newest)
        self._newest_job = worker.submit(job, name=f"{self._name}:bucket_{newest.index}")
        # Not before the worker knows the error: when backward() raises, step() looks for it there.
        self._newest_job.add_done_callback(partial(_fail_with, self._buckets))

    def give_up(self, error: OverlapError) -> None:
        """Fail the buckets that were not announced to the worker, because DDP waits for each of them."""
        while self._unannounced:
            self._unannounced.popleft().fail(error)
        self._unannounced_bytes = 0

    def wait(self) -> None:
        """Wait for the announced steps; on an accelerator, make its stream wait."""
        if self._newest_job is not None:
            with contextlib.suppress(Exception):
                self._newest_job.wait()

    def await_averages(self) -> None:
        """Wait, for some seconds at most, until no average of a failed pass is written to a bucket."""
        left = [bucket.averaged for bucket in self._buckets if not bucket.averaged.done()]
        deadline = time.monotonic() + _MOST_SECONDS
        for averaged in left:
            over = threading.Event()
            averaged.add_done_callback(partial(_set, over))
            over.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """Forget a pass that has ended; on an accelerator its job holds a bucket, which DDP may replace."""
        self.give_up(StepError("the backward pass of this bucket has failed"))
        self._newest_job = None
        self._buckets, self._waiting = [], deque()

    def _forget_taken(self) -> None:
        """Drop the buckets, the oldest ones, that the worker took although they were not announced."""
        while self._unannounced and self._unannounced[0].taken:
            self._unannounced_bytes -= self._unannounced.popleft().nbytes

    def _step_one(self, current: BackwardPass, bucket: Bucket, group: dist.ProcessGroup) -> torch.Tensor:
        with self._keeping_errors():
            bucket.await_average(current, group)
            (average,) = self._step(current, [bucket])
        return average

    def _step_until(
        self, current: BackwardPass, waiting: deque[Bucket], newest: Bucket, group: dist.ProcessGroup
    ) -> None:
        """Step the waiting buckets up to the newest announced one, and others that are ready by then."""
        with self._keeping_errors():
            while together := self._averaged_buckets(current, waiting, newest, group):
                for bucket, average in zip(together, self._step(current, together), strict=True):
                    bucket.complete(average)

    def _averaged_buckets(
        self, current: BackwardPass, waiting: deque[Bucket], newest: Bucket, group: dist.ProcessGroup
    ) -> list[Bucket]:
        """Take the next buckets, wait for their averages, and return them, to be stepped together."""
        together: list[Bucket] = []
        nbytes = 0
        while waiting and (waiting[0].is_ready or not newest.taken):
            if nbytes >= _WORTH_A_CALL and not waiting[0].is_ready:
                break  # the wait for the next average hides this step
            bucket = waiting.popleft()
            bucket.taken = True
            bucket.await_average(current, group)
            together.append(bucket)
            nbytes += bucket.nbytes
            if nbytes >= self._worth_a_step:
                break
        return together

    @contextlib.contextmanager
    def _keeping_errors(self) -> Any:
        try:
            yield
        except OverlapError as error:
            first = self._state.fail(error, error.__cause__)
            raise first from first.__cause__


def _set(over: threading.Event, _: object) -> None:
    over.set()


def _fail_with(buckets: Sequence[Bucket], stepped: torch.futures.Future[None]) -> None:
    """Give the error of a job to all buckets of the pass: no later one is stepped."""
    try:
        stepped.value()
    except Exception as error:  # noqa: BLE001 - backward() must raise any error
        for bucket in list(buckets):
            bucket.fail(error)


def _value(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    # Only an error raised in a callback, as here, reaches C++ waiters such as DDP's reducer.
    return done.value()
