"""One backward pass: its averaged buckets wait until they are stepped, in their order."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from weakref import WeakValueDictionary

import torch

from ddp_optim_overlap.errors import (
    OverlapError,
    StepError,
    StepReport,
    UnsupportedOptimizerError,
)
from ddp_optim_overlap.optimizers.stepper import Stepper
from ddp_optim_overlap.passes.averaging import completes_within
from ddp_optim_overlap.passes.bucket import Bucket, lend_gradients
from ddp_optim_overlap.passes.release import GradientRelease
from dist_utils.process_groups import error_text
from dist_utils.torch_compat import private, profiler_range

_LEAST_CALL = 2**20
"""Stepping this many bytes of gradients takes longer than calling the optimizer."""

_LARGEST_SHARE = 0.5
"""The share of a pass that is stepped as soon as it is averaged. Each call competes for the interpreter with
hooks that work on a thread: with 10 MB in 8 bits in 10 buckets, over 1 Gbit/s, one call for each bucket took
1.22 of the ordinary loop's time, calls of 4 MiB 1.11, and two calls 1.09 (two hosts, two cores)."""

_LARGEST_CALL = 2**23
"""So many bytes are always worth a call. With half of 60 MB a call the network hid less: 0.98 of the ordinary
loop's time, with calls of this size 0.95 (foreach AdamW, 1 Gbit/s, two hosts)."""

_MOST_SECONDS = 5.0
"""How long averages of a failed pass are waited for: some hooks never complete them."""


class PassState(Enum):
    """What a backward pass does with its buckets."""

    STEPS = "they are averaged, and then stepped"
    AVERAGES = "they are averaged: in pause(), on a rank without data under join(), or when a step has failed"
    REFUSES = "they are not averaged either: the ranks' collectives may no longer match"
    ENDED = "there are no more: it has finished, or was left before"


class BackwardPass:
    """The buckets of one backward pass.

    Everything happens on the thread of ``backward()``. What hides a step is not another thread but the wire:
    while the last averages are on their way, this thread would only wait for them.

    Args:
        stepper: Steps parameters.
        state: What it does with its buckets.
        number: Its number among the passes that step, 0 if it was not to step.

    Attributes:
        state: As given, or what it does since.
        report: What was stepped so far.
        failure: Why nothing more of it is stepped; ``backward()`` raises it.
        is_complete: Whether its last bucket was handed over.
        tasks: Marks of torch's tasks that have handed over buckets and still run, by their numbers. A pass
            inside it, such as a checkpoint's, is a task of its own.
        released: Frees the gradients of stepped buckets, if set.
    """

    def __init__(self, stepper: Stepper, state: PassState, number: int = 0) -> None:
        self.state, self.report = state, StepReport(number)
        self.failure: OverlapError | None = None
        self.is_complete = False
        self.tasks: WeakValueDictionary[int, TaskMark] = WeakValueDictionary()
        self.released: GradientRelease | None = None
        self._stepper = stepper
        self._waiting: deque[Bucket] = deque()
        """Buckets that were handed over and are not stepped yet, the oldest first."""
        self._averages: list[torch.futures.Future[object]] = []
        self._maybe_exposed = 0.0  # seconds of steps that no wait for an average has hidden yet

    def hand_over(self, bucket: Bucket) -> None:
        """Take a bucket whose average has begun."""
        self._averages.append(bucket.average)
        self.report = replace(self.report, buckets=len(self._averages))

    def queue(self, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        """Let a bucket wait for its step; return the future for DDP."""
        self._waiting.append(bucket)
        return bucket.done

    def step_waiting(
        self, share_used: Callable[[Sequence[Bucket]], Callable[[], None]], *, leave: int = 0
    ) -> None:
        """Step the oldest buckets, several together.

        Args:
            share_used: As that of the peers: called first, with the same buckets on every rank.
            leave: How many of the newest ones to leave.

        Raises:
            OverlapError: One was not averaged, or its step has failed.
        """
        due = list(self._waiting)[: len(self._waiting) - leave]
        if not due:
            return
        share_used(due)()  # first: a rank that has failed is noticed here at once
        half = _LARGEST_SHARE * sum(bucket.nbytes for bucket in due)
        nbytes = min(max(_LEAST_CALL, half), _LARGEST_CALL)
        while due:
            together = self._await_averages(due, nbytes)
            for average in self.step_now(together):
                self._waiting.popleft().done.set_result(average)
            del due[: len(together)]

    def _await_averages(self, due: Sequence[Bucket], enough: float) -> list[Bucket]:
        """Return the oldest buckets when they are averaged, so many that they are worth a call of a step."""
        together: list[Bucket] = []
        nbytes = 0
        for bucket in due:
            # The wait for the next average hides the step of those before; nothing hides the last step.
            worth_a_call = nbytes >= enough or (together and bucket is due[-1])
            if worth_a_call and not bucket.average.done():
                break
            self._await_average(bucket)
            together.append(bucket)
            nbytes += bucket.nbytes
            if self.released is not None:  # memory is freed as early as possible
                break
        return together

    def _await_average(self, bucket: Bucket) -> None:
        if not bucket.average.done():  # so the steps so far are hidden behind it
            hidden = self.report.seconds_hidden + self._maybe_exposed
            self.report, self._maybe_exposed = replace(self.report, seconds_hidden=hidden), 0.0
        bucket.await_average(None if self.released is None else self.released.seconds_to_wait)

    def step_now(self, buckets: Sequence[Bucket]) -> list[torch.Tensor]:
        """Step averaged buckets together, if the pass steps.

        Returns:
            The tensors that DDP is to take for the averages.

        Raises:
            StepError: The step has failed.
            UnsupportedOptimizerError: It has done what no step per parameter does.
        """
        if self.state is not PassState.STEPS:
            return [bucket.buffer for bucket in buckets]
        indices = tuple(bucket.index for bucket in buckets)
        parameters = [one for bucket in buckets for one in bucket.parameters]
        averages = [one for bucket in buckets for one in bucket.averages()]
        device = buckets[0].buffer.device
        began = time.perf_counter()
        try:
            name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
            with _modes_of_step(device, name), lend_gradients(parameters, averages):
                for bucket in buckets:
                    self._stepper.prepare(bucket.parameters)
                for part in [parameters] if self.released is None else self.released.parts(buckets[0]):
                    self._stepper.step(part)
            results = [bucket.buffer for bucket in buckets]
            if self.released is not None:  # then it is one bucket
                results = [self.released.give_back(buckets[0], averages)]
        except BaseException as error:
            self.report = replace(self.report, partial=indices)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {error_text(error)}"
            raise kind(text, self.report) from error
        seconds, before = time.perf_counter() - began, self.report
        self.report = replace(before, stepped=before.stepped + indices, seconds=before.seconds + seconds)
        if device.type == "cpu":
            self._maybe_exposed += seconds
        return results

    def pop_failure(self) -> OverlapError | None:
        """Return the failure, to be raised, and keep it no longer: its frames would keep the model alive."""
        failure, self.failure = self.failure, None
        return failure

    def leave_waiting(self) -> None:
        """Let DDP have the buckets that will not be stepped, for which it would wait."""
        while self._waiting:
            bucket = self._waiting.popleft()
            bucket.done.set_result(bucket.buffer)

    def await_averages(self) -> None:
        """Wait, for some seconds at most, until no average of a failed pass is written to a bucket."""
        deadline = time.monotonic() + _MOST_SECONDS
        for average in self._averages:
            completes_within(average.done, deadline - time.monotonic())

    def end(self) -> None:
        """Clean up after the pass, once, whether it succeeded or failed."""
        if self.state is PassState.ENDED:
            return
        self.state = PassState.ENDED
        self.leave_waiting()
        if self.released is not None:
            self.released.end()
        if self.failure is None:
            self._averages = []  # they hold buffers, which DDP may replace


@contextlib.contextmanager
def _modes_of_step(device: torch.device, name: str) -> Iterator[None]:
    """Set torch's modes as around a loop's ``step()``: no autocast, for example, even if backward() has it.

    Turning autocast off costs as much as all the rest.
    """
    autocast = torch.is_autocast_enabled(device.type)
    without_autocast = torch.autocast(device.type, enabled=False) if autocast else contextlib.nullcontext()
    with torch.no_grad(), without_autocast, profiler_range(name):
        yield


class TaskMark:
    """Is alive as long as the callbacks of a task, which torch drops if the task fails."""


def is_inside_node() -> bool:
    """Return whether a node of a backward pass runs on this thread, and not what follows all nodes.

    No public name up to torch 2.15.
    """
    return private("torch._C", "_current_autograd_node", "the end of a backward pass")() is not None
