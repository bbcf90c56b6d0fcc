"""The way of buckets that are stepped while later ones are computed and sent."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import BucketGradients, lent
from ddp_optim_overlap.bucket_jobs import as_outside_of_backward, not_averaged, text_of, used_anywhere
from ddp_optim_overlap.errors import OverlapError, StepError, UnsupportedOptimizerError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_release import GradientRelease
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.weight_reuse import WeightWatch
from dist_utils import OrderedWorker

__all__ = ["BucketSteps", "HandedOver"]

_TOGETHER = 4 * 2**20
"""Bytes of gradients that are worth a step of their own."""


@dataclass(eq=False)
class HandedOver:
    """One bucket of a backward pass, as DDP has handed it over.

    Attributes:
        index: Its number in DDP.
        gradients: Where its average will be.
        used: Which of its parameters got a gradient on this rank; ``None`` if all have, everywhere.
        reduced: What the communication hook has returned.
    """

    index: int
    gradients: BucketGradients
    used: list[bool] | None
    reduced: torch.futures.Future[Any]
    done: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)


class BucketSteps:
    """Steps buckets when they are averaged, in their order; small ones and those that are ready together.

    To wake the worker and to call an optimizer takes as long as to step some MiB. So small buckets wait for
    each other until they are worth it. The last bucket of a pass, whose step nothing hides, is stepped alone.

    Args:
        stepper: Steps.
        contents: Keeps what gradients were when they were used.
        watch: Told of stepped weights, if anybody is.
        release: Takes gradients away when they were used, if anybody does.
        name: What a profiler's ranges begin with.
    """

    def __init__(
        self,
        stepper: Stepper,
        contents: GradientContents,
        watch: WeightWatch | None,
        release: GradientRelease | None,
        name: str,
    ) -> None:
        self._stepper, self._contents, self._watch, self._release = stepper, contents, watch, release
        self._name = name
        # A watch is to find whatever may happen in some run; and memory is given back as early as can be.
        self._together = _TOGETHER if watch is None and release is None else 0
        self._waiting: deque[HandedOver] = deque()
        self._unannounced: list[HandedOver] = []
        self._newest_job: torch.futures.Future[None] | None = None

    def begin(self) -> None:
        """A backward pass begins."""
        # What an earlier one has left behind failed with it.
        self._waiting, self._unannounced = deque(), []

    def take(
        self, worker: OrderedWorker, current: BackwardPass, bucket: HandedOver, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future of a bucket's buffer, when its parameters are stepped.

        Args:
            worker: Steps on its thread or, on an accelerator, on its stream.
            current: The backward pass.
            bucket: The next one of it.
            last: Whether it is the last one.
        """
        device = bucket.gradients.buffer.device
        if device.type != "cpu":
            job = partial(self._step_one, current, bucket)
            return worker.submit(job, device=device, name=f"{self._name}:bucket_{bucket.index}")
        result = bucket.done.then(_value)
        if last and self._unannounced:
            self._announce(worker, current)
        self._waiting.append(bucket)
        self._unannounced.append(bucket)
        if last or self._are_enough(self._unannounced):
            self._announce(worker, current)
        return result

    def _are_enough(self, buckets: Sequence[HandedOver]) -> bool:
        """Whether buckets are worth a step."""
        return sum(map(_size, buckets)) >= self._together

    def _announce(self, worker: OrderedWorker, current: BackwardPass) -> None:
        """Let the worker step what is waiting."""
        announced, self._unannounced = self._unannounced, []
        newest = announced[-1]
        job = partial(self._step_until, current, self._waiting, newest)
        self._newest_job = worker.submit(job, name=f"{self._name}:bucket_{newest.index}")
        self._newest_job.add_done_callback(partial(_fail_with, announced))

    def give_up(self, error: OverlapError) -> None:
        """Give an error to the buckets that are still waiting for others: DDP waits for each of them."""
        unannounced, self._unannounced = self._unannounced, []
        for bucket in unannounced:
            bucket.done.set_exception(error)  # type: ignore[arg-type] # torch's annotation

    def wait(self) -> None:
        """Return when the steps that have been begun are over. Does not raise."""
        if self._newest_job is not None:
            with contextlib.suppress(Exception):
                self._newest_job.wait()

    def _step_one(self, current: BackwardPass, bucket: HandedOver, group: dist.ProcessGroup) -> torch.Tensor:
        self._await(current, bucket, group)
        (average,) = self._step(current, [bucket])
        return average

    def _step_until(
        self,
        current: BackwardPass,
        waiting: deque[HandedOver],
        newest: HandedOver,
        group: dist.ProcessGroup,
    ) -> None:
        """Wait for averages and step with them, as far as the newest bucket; with more, if they are ready."""
        announced = not newest.done.done()
        while announced:
            together: list[HandedOver] = []
            while announced or (waiting and waiting[0].reduced.done()):
                bucket = waiting.popleft()
                together.append(bucket)
                announced = announced and bucket is not newest
                self._await(current, bucket, group)
                if self._are_enough(together):
                    break
            averages = self._step(current, together)
            for bucket, average in zip(together, averages, strict=True):
                bucket.done.set_result(average)

    def _await(self, current: BackwardPass, bucket: HandedOver, group: dist.ProcessGroup) -> None:
        try:
            if bucket.used is not None:
                bucket.used = used_anywhere(bucket.used, group, bucket.gradients.buffer.device)
            bucket.gradients.write(current.await_bucket(bucket.reduced))
        except Exception as error:
            raise not_averaged(bucket.index, error, current) from error

    def _step(self, current: BackwardPass, buckets: Sequence[HandedOver]) -> list[torch.Tensor]:
        """Return what DDP is to take for the averages."""
        if current.steps:
            with current.stepping:
                if not current.cancelled:
                    return self._step_now(current, buckets)
        return [bucket.gradients.buffer for bucket in buckets]

    def _step_now(self, current: BackwardPass, buckets: Sequence[HandedOver]) -> list[torch.Tensor]:
        indices = [bucket.index for bucket in buckets]
        device = buckets[0].gradients.buffer.device
        averages = [bucket.gradients.buffer for bucket in buckets]
        parameters: list[torch.Tensor] = []
        averaged: list[torch.Tensor | None] = []
        for bucket in buckets:
            parameters += bucket.gradients.parameters
            averaged += _averaged(bucket)
        name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
        began = time.perf_counter()
        try:
            with as_outside_of_backward(device, name), lent(parameters, averaged) as own:
                for bucket in buckets:
                    self._stepper.prepare(bucket.gradients.parameters)
                if self._release is None:
                    self._stepper.step(parameters)
                    self._keep(buckets, own)
                else:
                    for part in self._release.parts(buckets[0].gradients):
                        self._stepper.step(part)
            if self._release is not None:
                averages = [self._release.give_back(current, buckets[0].gradients, averaged)]
        except BaseException as error:  # sys.exit() too: it would end a thread, and nobody would know
            current.partial = tuple(indices)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {text_of(error)}"
            raise kind(text, current.report()) from error
        current.count_step(indices, time.perf_counter() - began, on_host=device.type == "cpu")
        if self._watch is not None:
            self._watch.stepped(parameters)
        return averages

    def _keep(self, buckets: Sequence[HandedOver], own: Sequence[torch.Tensor | None]) -> None:
        begin = 0
        for bucket in buckets:
            end = begin + len(bucket.gradients.parameters)
            self._contents.keep(bucket.gradients, bucket.used, own[begin:end])
            begin = end


def _size(bucket: HandedOver) -> int:
    buffer = bucket.gradients.buffer
    return _TOGETHER if buffer.is_sparse else buffer.nbytes


def _averaged(bucket: HandedOver) -> Sequence[torch.Tensor | None]:
    views = bucket.gradients.views
    if bucket.used is None:
        return views
    return [
        # A parameter that no rank has used keeps what it had before: nothing, or zeros.
        view if is_used else parameter.grad
        for parameter, view, is_used in zip(bucket.gradients.parameters, views, bucket.used, strict=True)
    ]


def _fail_with(buckets: Sequence[HandedOver], stepped: torch.futures.Future[None]) -> None:
    """Give the error of a job to the buckets that it has not come to."""
    try:
        stepped.value()
    except Exception as error:  # noqa: BLE001 - whatever it is, backward() must raise it
        for bucket in buckets:
            if not bucket.done.done():
                bucket.done.set_exception(error)  # type: ignore[arg-type] # torch's annotation


def _value(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    # Raising here, in a callback, makes an error that C++ waiters such as DDP's reducer see too.
    return done.value()
