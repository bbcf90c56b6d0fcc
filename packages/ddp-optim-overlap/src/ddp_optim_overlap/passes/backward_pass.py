"""One backward pass: its buckets wait until a step is worth it, are averaged, and are stepped on a worker."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    OverlapError,
    StepError,
    UnsupportedOptimizerError,
)
from ddp_optim_overlap.passes.bucket import Bucket, lend_gradients
from ddp_optim_overlap.passes.gradient_watch import GradientWatch
from ddp_optim_overlap.passes.phase import OverlapState
from ddp_optim_overlap.passes.release import ReleasedPass
from ddp_optim_overlap.passes.weight_reuse import WeightWatch
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker
from dist_utils.process_groups import error_text, same_error
from dist_utils.torch_compat import profiler_range

NAME = "ddp-optim-overlap"
"""The name of the worker, and the prefix of its jobs' ranges in a profiler."""

_WORTH_A_STEP = 4 * 2**20
"""Stepping this many bytes of gradients takes longer than waking the worker."""

_WORTH_A_CALL = 2**20
"""Stepping this many bytes of gradients takes longer than calling the optimizer."""

_MOST_SECONDS = 5.0
"""How long averages of a failed pass are waited for: some hooks never complete them."""


class PassKind(Enum):
    """What becomes of the buckets of a pass."""

    STEPS = "averaged and stepped"
    JOINED = "averaged with the ranks that step; under join(), this rank has no more data"
    PAUSED = "averaged, in handle.pause() or after remove()"
    REFUSED = "nothing: after an error, the ranks' collectives may no longer match"


class PassStage(Enum):
    """How far a pass has come."""

    BEGUN = "buckets are still to be handed over"
    COMPLETE = "the last bucket was handed over"
    ENDED = "it has finished, or was left before"


class Stepper:
    """Steps parameters for an engine.

    Attributes:
        norm: The norm of the last step's gradients before clipping, if it was computed on the way.
    """

    norm: torch.Tensor | None = None

    def terms(self) -> dict[str, object]:
        """Return the settings that must be identical on all ranks."""
        return {}

    def begin(self) -> None:
        """Prepare for a pass that hands over its first bucket, before any communication. May raise."""

    def join(self) -> None:
        """Do the same for a pass of other ranks, under ``join()``, for which this rank has no data."""

    def require_averaged(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if a parameter would have to be stepped that DDP does not average.

        Args:
            averaged: The parameters that have been in a bucket.
        """

    def prepare(self, parameters: Sequence[torch.Tensor]) -> None:
        """Change the ``.grad`` of a whole bucket, to clip it, say."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, gradients: GradientWatch) -> None:
        """Clean up after a backward pass that has stepped.

        Args:
            gradients: Learns which gradients were used.
        """

    def remove(self, gradients: GradientWatch, *, failed: bool) -> None:  # noqa: ARG002 - for subclasses
        """End the overlap.

        Args:
            gradients: Stopped, once nobody asks it any more.
            failed: Whether there was an error, so that ranks may have stepped with different gradients.
        """
        gradients.stop()


class BackwardPass:
    """Lets a worker step the averaged buckets of one pass in their order, small ones together.

    Waking the worker and calling an optimizer takes as long as stepping some MiB. So the thread of
    ``backward()`` announces buckets to the worker when there are enough of them, and the last bucket of a
    pass, whose step nothing hides, by itself. The worker steps the announced buckets, and any others that
    are ready by then.

    Only the thread of ``backward()`` adds and announces buckets; only the worker takes them. Every bucket is
    completed once, by whichever thread comes first.

    Args:
        kind: What becomes of its buckets.
        state: Keeps the first error.
        stepper: Steps parameters.
        number: Its number among the passes that step.

    Attributes:
        kind: As given, until the pass is refused.
        failure: Why nothing more of it is stepped; later buckets are averaged, as on the other ranks.
        stage: How far it has come.
        tasks: The numbers of torch's graph tasks that have handed over buckets, each with a weak reference to
            what the task keeps alive until it ends.
        buckets: How many were handed over.
        watch: Notified of stepped weights, if set.
        released: Frees the gradients of stepped buckets, if set. With either, each bucket is stepped by
            itself: a watch must find what may happen in any run, and memory is freed as early as possible.
    """

    def __init__(self, kind: PassKind, state: OverlapState, stepper: Stepper, number: int = 0) -> None:
        self.kind = kind
        self.failure: Exception | None = None
        self.stage = PassStage.BEGUN
        self.tasks: dict[int, Callable[[], object]] = {}
        self.buckets = 0
        self.watch: WeightWatch | None = None
        self.released: ReleasedPass | None = None
        self._state, self._stepper = state, stepper
        self._queue: list[Bucket] = []
        """All buckets on the host, which fail together."""
        self._announced = self._taken = 0  # how many of them, the oldest ones
        self._bytes_since = 0  # of those that came after the last announcement
        self._newest_job: torch.futures.Future[Any] | None = None
        self._step_lock = threading.Lock()
        self._report = StepReport(number)  # without the number of buckets, which another thread counts
        self._maybe_exposed = 0.0  # seconds of steps that no wait for an average has hidden yet

    # ---- on the thread of backward() ----

    def require_next(self, index: int) -> None:
        """Raise if this is not the number of the next bucket."""
        if index != self.buckets:
            raise ConfigError(
                "DDP has left out a bucket of this backward pass, as with "
                "skip_all_reduce_unused_params=True: leave that option out"
            )

    def take(
        self, worker: OrderedWorker, bucket: Bucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future for DDP that completes when the bucket's parameters are stepped.

        Args:
            worker: Steps on its thread or, on an accelerator, on its stream.
            bucket: The next bucket.
            last: Whether this is the last bucket.
        """
        device = bucket.gradients.buffer.device
        if device.type != "cpu":
            job = partial(self._step_one, bucket)
            self._newest_job = done = worker.submit(job, device=device, name=f"{NAME}:bucket_{bucket.index}")
            return done
        done = bucket.future()
        if last:
            self._announce(worker)
        self._queue.append(bucket)
        self._bytes_since += bucket.nbytes
        if last or self._alone or self._bytes_since >= _WORTH_A_STEP:
            self._announce(worker)
        return done

    def announce_rest(self, worker: OrderedWorker) -> None:
        """Let the worker step what DDP is about to wait for, if no last bucket has come.

        A hook does not know whether DDP leaves the last one out (``skip_all_reduce_unused_params``).
        """
        if self.stage is PassStage.BEGUN and self.failure is None:
            self._announce(worker)

    def _announce(self, worker: OrderedWorker) -> None:
        """Let the worker step the buckets that wait for others, unless it has taken them already."""
        count, self._bytes_since = len(self._queue), 0
        if max(self._announced, self._taken) >= count:
            return
        self._announced = count
        name = f"{NAME}:bucket_{self._queue[-1].index}"
        self._newest_job = worker.submit(partial(self._step_until, count), name=name)
        # Not before the worker knows the error: when backward() raises, step() looks for it there.
        self._newest_job.add_done_callback(partial(_fail_with, self._queue))

    def fail(self, error: OverlapError) -> OverlapError:
        """Let no further step begin, and wait for the one in progress; return the first error, to be raised.

        DDP waits for every bucket: those that the worker does not know fail here.
        """
        with self._step_lock:
            if self._report.number:
                report = self._state.report = self.report()
                error = error.with_report(report)
            failure = self._state.fail(error)
            self.failure = same_error(failure)  # never raised itself: frames would keep the model
        for bucket in self._queue[self._announced :]:
            bucket.end(failure)
        return failure

    def wait(self) -> None:
        """Wait for the announced steps; on an accelerator, make its stream wait."""
        if self._newest_job is not None:
            with contextlib.suppress(Exception):
                self._newest_job.wait()

    @property
    def _alone(self) -> bool:
        return self.watch is not None or self.released is not None

    def await_averages(self) -> None:
        """Wait, for some seconds at most, until no average of a failed pass is written to a bucket."""
        deadline = time.monotonic() + _MOST_SECONDS
        for bucket in self._queue:
            over = threading.Event()
            bucket.average.add_done_callback(partial(_set, over))
            over.wait(max(0.0, deadline - time.monotonic()))

    def runs(self) -> bool:
        """Whether torch is still running one of the tasks; between nested ones it may not be."""
        return any(mark() is not None for mark in list(self.tasks.values()))

    def end(self) -> None:
        """Clean up after the pass, once, whether it succeeded or failed."""
        if self.stage is PassStage.ENDED:
            return
        self.stage = PassStage.ENDED
        if self.watch is not None:
            self.watch.end()  # otherwise nobody could write .grad
        if self.released is not None:
            with self._step_lock:
                self.released.end()
        if self.failure is None:
            self._queue = []  # they hold averages
            self._newest_job = None  # on an accelerator it holds a bucket, which DDP may replace
            if self._report.number:
                self._state.report = self.report(self._stepper.norm)

    def report(self, norm: torch.Tensor | None = None) -> StepReport:
        """Return what was stepped so far."""
        return replace(self._report, buckets=self.buckets, norm=norm)

    # ---- on the worker ----

    def _step_one(self, bucket: Bucket, group: dist.ProcessGroup) -> torch.Tensor:
        with self._keep_errors():
            self._await_average(bucket, group)
            (average,) = self._step([bucket])
        return average

    def _step_until(self, count: int, group: dist.ProcessGroup) -> None:
        """Step this many of the oldest buckets, and others that are ready by then."""
        with self._keep_errors():
            while together := self._take_averaged(count, group):
                for bucket, average in zip(together, self._step(together), strict=True):
                    bucket.end(average)

    def _take_averaged(self, count: int, group: dist.ProcessGroup) -> list[Bucket]:
        """Take the next buckets, wait for their averages, and return them, to be stepped together."""
        together: list[Bucket] = []
        nbytes = 0
        while self._taken < len(self._queue):
            bucket = self._queue[self._taken]
            # The wait for the next average hides the step of those before.
            if not bucket.is_ready and (self._taken >= count or nbytes >= _WORTH_A_CALL):
                break
            self._taken += 1
            self._await_average(bucket, group)
            together.append(bucket)
            nbytes += bucket.nbytes
            if self._alone or nbytes >= _WORTH_A_STEP:
                break
        return together

    def _await_average(self, bucket: Bucket, group: dist.ProcessGroup) -> None:
        """Wait until the average is in the bucket."""
        try:
            bucket.await_used(group)
            if not bucket.average.done():  # so the steps so far are hidden behind it
                hidden = self._report.seconds_hidden + self._maybe_exposed
                self._report, self._maybe_exposed = replace(self._report, seconds_hidden=hidden), 0.0
            bucket.gradients.write(bucket.average.wait())
        except OverlapError:
            raise
        except Exception as error:
            text = f"bucket {bucket.index} was not averaged: {error_text(error)}"
            raise CommunicationError(text) from error

    def _step(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Step averaged buckets together, unless the pass does not; return DDP's tensors for the averages."""
        if self.kind is PassKind.STEPS:
            with self._step_lock:
                if self.failure is None:
                    return self._step_now(buckets)
        return [bucket.gradients.buffer for bucket in buckets]

    def _step_now(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        indices = tuple(bucket.index for bucket in buckets)
        first = buckets[0].gradients
        parameters = [one for bucket in buckets for one in bucket.gradients.parameters]
        averages = [one for bucket in buckets for one in bucket.averages()]
        results = [bucket.gradients.buffer for bucket in buckets]
        began = time.perf_counter()
        try:
            name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
            with _modes_of_step(first.buffer.device, name), lend_gradients(parameters, averages):
                for bucket in buckets:
                    self._stepper.prepare(bucket.gradients.parameters)
                for part in [parameters] if self.released is None else self.released.parts(first):
                    self._stepper.step(part)
            if self.released is not None:
                results = [self.released.give_back(first, averages)]
        except BaseException as error:  # also sys.exit(), which would silently end the thread
            self._report = replace(self._report, partial=indices)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {error_text(error)}"
            raise kind(text, self.report()) from error
        seconds = time.perf_counter() - began
        before = self._report
        self._report = replace(before, stepped=before.stepped + indices, seconds=before.seconds + seconds)
        if first.buffer.device.type == "cpu":
            self._maybe_exposed += seconds
        if self.watch is not None:
            self.watch.watch(parameters)
        return results

    @contextlib.contextmanager
    def _keep_errors(self) -> Iterator[None]:
        try:
            yield
        except OverlapError as error:
            first = self.fail(error)
            raise first from first.__cause__


@contextlib.contextmanager
def _modes_of_step(device: torch.device, name: str) -> Iterator[None]:
    """Set torch's modes as around a loop's ``step()``: no autocast, for example, even if backward() has it.

    Autocast is off on the worker's thread, and turning it off costs as much as all the rest.
    """
    autocast = torch.is_autocast_enabled(device.type)
    without_autocast = torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext()
    with torch.no_grad(), without_autocast, profiler_range(name):
        yield


def _set(over: threading.Event, _: object) -> None:
    over.set()


def _fail_with(buckets: Sequence[Bucket], stepped: torch.futures.Future[None]) -> None:
    """Give the error of a job to all buckets of the pass: no later one is stepped."""
    try:
        stepped.value()
    except Exception as error:  # noqa: BLE001 - backward() must raise any error
        for bucket in list(buckets):
            bucket.end(error)
