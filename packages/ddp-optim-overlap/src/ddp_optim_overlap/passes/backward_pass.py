"""One backward pass: its averaged buckets wait until they are stepped, in their order."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple
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

_LEAST_SECONDS = 0.006
"""A part whose step takes so long is stepped while later averages are awaited. Each call costs up to half a
millisecond besides the step, and competes with hooks that work on a thread."""

_LEAST_SECONDS_AT_REST, _REST = 0.001, 5.0
"""Such a part where the last pass has waited so many times as long for averages as for its steps: a slow wire
leaves the processor with nothing to do. 10 MB on two hosts at 1 Gbit/s took 101 ms instead of 104, and 58
instead of 61 in 16 bits. On loopback, where it competes, the median pass waited 0 to 3.5 times as long."""

_MOST_SECONDS = 5.0
"""How long averages of a failed pass are waited for: some hooks never complete them."""


class Pace(NamedTuple):
    """How long parts of earlier passes took.

    Attributes:
        step: The seconds that the step of a byte of gradients took, 0 if that is not known.
        rests: Whether averages were awaited much longer than all steps took.
    """

    step: float = 0.0
    rests: bool = False


class PassState(Enum):
    """What a backward pass does with its buckets."""

    STEPS = "they are averaged, and then stepped"
    AVERAGES = "they are averaged: in pause(), on a rank without data under join(), or when a step has failed"
    REFUSES = "they are not averaged either: the ranks' collectives may no longer match"
    ENDED = "there are no more: it has finished, or was left before"


class BackwardPass:
    """The buckets of one backward pass.

    Everything happens on the thread of ``backward()``. What hides a step is not another thread but the wire:
    while the last averages are on their way, this thread would only wait for them. What nothing hides is
    stepped in one call when DDP is through, with the ``.grad`` that DDP has written: lending views of buckets
    to 80 parameters took a tenth of a millisecond.

    Args:
        stepper: Steps parameters.
        state: What it does with its buckets.
        number: Its number among the passes that step, 0 if it was not to step.
        pace: That of an earlier pass.

    Attributes:
        state: As given, or what it does since.
        number: As given.
        failure: Why nothing more of it is stepped; ``backward()`` raises it.
        is_complete: Whether its last bucket was handed over.
        tasks: Marks of torch's tasks that have handed over buckets and still run, by their numbers. A pass
            inside it, such as a checkpoint's, is a task of its own.
        released: Frees the gradients of stepped buckets, if set.
        waiting: Buckets that were handed over and DDP does not have yet, the oldest first.
        steps_unused: Whether parameters that no rank has used are stepped, with a zero gradient, which DDP
            does not write into ``.grad``.
    """

    def __init__(
        self,
        stepper: Stepper,
        state: PassState,
        number: int = 0,
        pace: Pace = Pace(),  # noqa: B008 - frozen
    ) -> None:
        self.state, self.number, self._pace = state, number, pace
        self.failure: OverlapError | None = None
        self.is_complete = False
        self.tasks: WeakValueDictionary[int, TaskMark] = WeakValueDictionary()
        self.released: GradientRelease | None = None
        self.steps_unused = False
        self._stepper = stepper
        self.waiting: deque[Bucket] = deque()
        self._rest: list[Bucket] = []
        """Buckets that DDP has and that are to be stepped after it."""
        self._averages: list[torch.futures.Future[object]] = []
        self._buckets = 0
        self._stepped: tuple[int, ...] = ()
        self._partial: tuple[int, ...] = ()
        self._seconds = self._seconds_hidden = 0.0
        self._maybe_exposed = 0.0  # seconds of steps that no wait for an average has hidden yet
        self._waited = 0.0

    @property
    def pace(self) -> Pace:
        """What is known now, by this pass or by earlier ones."""
        if not self._seconds:
            return self._pace
        return self._pace._replace(rests=self._waited > _REST * self._seconds)

    @property
    def report(self) -> StepReport:
        """What was stepped so far."""
        return StepReport(
            self.number, self._buckets, self._stepped, self._partial, self._seconds, self._seconds_hidden
        )

    def hand_over(self, bucket: Bucket) -> None:
        """Take a bucket whose average has begun."""
        self._averages.append(bucket.average)
        self._buckets += 1

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
        due = list(self.waiting)[: len(self.waiting) - leave]
        if not due:
            return
        share_used(due)()  # first: a rank that has failed is noticed here at once
        while due:
            together = self._await_averages(due)
            del due[: len(together)]
            if due or self.released is not None or self.steps_unused:
                results = self.step_now(together)
            else:
                self._rest, results = together, [bucket.buffer for bucket in together]
            for result in results:  # those of buckets to leave are not averaged yet
                self.waiting.popleft().done.set_result(result)

    def step_rest(self) -> None:
        """Step the buckets that are left, when DDP has written their averages into ``.grad``.

        Raises:
            OverlapError: As :meth:`step_now`.
        """
        rest, self._rest = self._rest, []
        if rest and self.state is PassState.STEPS:
            self._call_step(rest, contextlib.nullcontext())

    def _await_averages(self, due: Sequence[Bucket]) -> list[Bucket]:
        """Return the oldest buckets when they are averaged, so many that they are worth a call of a step."""
        together: list[Bucket] = []
        seconds, least = 0.0, _LEAST_SECONDS
        if self._pace.rests:
            least = min(least, _LEAST_SECONDS_AT_REST)
        for bucket in due:
            # The wait for the next average hides the step of those before.
            if together and seconds >= least and not bucket.average.done():
                break
            self._await_average(bucket)
            together.append(bucket)
            seconds += bucket.nbytes * self._pace.step
            if self.released is not None:  # memory is freed as early as possible
                break
        return together

    def _await_average(self, bucket: Bucket) -> None:
        if not bucket.average.done():  # so the steps so far are hidden behind it
            self._seconds_hidden += self._maybe_exposed
            self._maybe_exposed = 0.0
        began = time.perf_counter()
        bucket.await_average(None if self.released is None else self.released.seconds_to_wait)
        self._waited += time.perf_counter() - began

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
        averages = [one for bucket in buckets for one in bucket.averages()]
        self._call_step(buckets, lend_gradients(_parameters_of(buckets), averages))
        if self.released is not None:  # then it is one bucket
            return [self.released.give_back(buckets[0], averages)]
        return [bucket.buffer for bucket in buckets]

    def _call_step(
        self, buckets: Sequence[Bucket], gradients: contextlib.AbstractContextManager[None]
    ) -> None:
        indices = tuple(bucket.index for bucket in buckets)
        parameters = _parameters_of(buckets)
        device = buckets[0].buffer.device
        began = time.perf_counter()
        try:
            name = f"overlapped step:bucket_{'_'.join(map(str, indices))}"
            with _modes_of_step(device, name), gradients:
                for bucket in buckets:
                    self._stepper.prepare(bucket.parameters)
                for part in [parameters] if self.released is None else self.released.parts(buckets[0]):
                    self._stepper.step(part)
        except BaseException as error:
            self._partial = indices
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            text = f"the step of bucket {', '.join(map(str, indices))} failed: {error_text(error)}"
            raise kind(text, self.report) from error
        seconds = time.perf_counter() - began
        self._pace = self._pace._replace(step=seconds / max(1, sum(bucket.nbytes for bucket in buckets)))
        self._stepped += indices
        self._seconds += seconds
        if device.type == "cpu":
            self._maybe_exposed += seconds

    def pop_failure(self) -> OverlapError | None:
        """Return the failure, to be raised, and keep it no longer: its frames would keep the model alive."""
        failure, self.failure = self.failure, None
        return failure

    def leave_waiting(self) -> None:
        """Let DDP have the buckets that will not be stepped, for which it would wait."""
        while self.waiting:
            bucket = self.waiting.popleft()
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


def _parameters_of(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    return [one for bucket in buckets for one in bucket.parameters]


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
