"""The state of the overlapped hook: backward passes, whose buckets are averaged and stepped."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass, CancelUnlessCalled
from ddp_optim_overlap.bucket_gradients import KnownBuckets, average_of
from ddp_optim_overlap.bucket_jobs import (
    failed,
    meet_peers,
    raise_error,
    text_of,
    wait_for_all,
)
from ddp_optim_overlap.bucket_steps import BucketSteps, HandedOver
from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    OverlapError,
    StepError,
)
from ddp_optim_overlap.first_error import FirstError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_release import GradientRelease
from ddp_optim_overlap.gradient_watch import GradientWatch
from ddp_optim_overlap.report import StepReport
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.weight_reuse import WeightWatch
from ddp_optim_overlap.whole_step import WholeStep
from dist_utils import AgreementError, OrderedWorker
from dist_utils.comm_hooks import is_pair
from dist_utils.torch_compat import GradBucket, after_backward, inside_backward

__all__ = ["Engine"]

_NAME = "ddp-optim-overlap"
"""Of the worker, and what a profiler's ranges of its jobs begin with."""


class Engine:
    """Hands the buckets of backward passes on to be averaged and, averaged, to be stepped.

    Args:
        process_group: Whose ranks train together.
        parameters: Of the model; frozen ones too, which may be unfrozen later.
        stepper: What to do with averaged gradients.
        comm_hook: Averages; any hook.
        comm_state: Its first argument.
        unused_possible: Returns whether parameters may be left out of a backward pass. Then the ranks tell
            each other which ones got a gradient. Asked when a pass begins.
        check: Watch for stepped weights that the same backward pass reads.
        release: Takes the gradients of every bucket away when it is stepped.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[torch.Tensor],
        stepper: Stepper,
        comm_hook: Callable[[Any, GradBucket], torch.futures.Future[Any]],
        comm_state: object,
        *,
        unused_possible: Callable[[], bool] = lambda: False,
        check: bool = False,
        release: GradientRelease | None = None,
    ) -> None:
        self.gradients = GradientWatch(parameters)
        self.release = release
        if release is not None and not release.memory.stays_readable:
            self.gradients.tell(release.memory.restore)
        self.contents = GradientContents()
        self.buckets = KnownBuckets()
        self.paused = False
        self.averaged: set[torch.Tensor] = set()
        """Whose gradients have been in a bucket."""
        self.passes = 0
        """How many have stepped, or were to."""
        self._stepper = stepper
        self._comm_hook = comm_hook
        self._comm_state = comm_state
        self._ask_unused_possible = unused_possible
        self._unused_possible = False
        self._watch = WeightWatch() if check else None
        self._by_bucket = BucketSteps(stepper, self.contents, self._watch, release, _NAME)
        self._whole = WholeStep(stepper, self.contents) if stepper.whole else None
        worker = OrderedWorker(process_group, name=_NAME, terms=self._terms)
        self._worker: OrderedWorker | None = worker
        self._failure = FirstError(worker)
        self._pass: BackwardPass | None = None
        self._report = StepReport()
        self._agreement: torch.futures.Future[None] | None = None
        self._stepped_before_closure = False

    @property
    def removed(self) -> bool:
        """Whether :meth:`remove` was called."""
        return self._worker is None

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Be the communication hook for one bucket."""
        if is_pair(bucket):
            raise ConfigError(
                "the overlapped step needs buckets, and DDP's python reducer has none: set "
                "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
            )
        try:
            return self._take(bucket)
        except OverlapError as error:
            # Raised here, it would leave DDP in the middle of a pass, and the model of no use any more.
            self._failure.refusal = error
            self._by_bucket.give_up(error)
            return failed(error)

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._failure.refusal = None
            self._begin()
        if self._failure.refusal is not None:
            return failed(self._failure.refusal)
        current, last = self._pass, bucket.is_last()
        if current is None or self._worker is None:
            self.gradients.take_as_new(bucket.parameters())
            if last:
                self.gradients.forget_arrivals()
            return self._comm_hook(self._comm_state, bucket).then(partial(average_of, bucket.buffer()))
        current.buckets += 1
        gradients = self.buckets.gradients(bucket)
        if not self.averaged.issuperset(gradients.parameters):
            self.averaged.update(gradients.parameters)
        self._require_observed(gradients.parameters)
        used = self._used(gradients.parameters)
        if last:
            self.gradients.forget_arrivals()
        reduced = self._communicate(bucket, current)
        if self._whole is None:
            told = used if self._unused_possible else None
            handed_over = HandedOver(bucket.index(), gradients, told, reduced)
            done = self._step_bucket(self._worker, current, handed_over, used, last=last)
        else:
            # A callback may be dropped last by Gloo's thread, which must not end its own process group.
            keep: weakref.WeakMethod[Any] = weakref.WeakMethod(self._first_of)
            everything = used is not None and all(used)
            done = self._whole.take(current, bucket.index(), gradients, reduced, used=everything, keep=keep)
        if last:
            self._end_of_buckets(current, gradients.buffer.device)
        return done

    def _step_bucket(
        self,
        worker: OrderedWorker,
        current: BackwardPass,
        bucket: HandedOver,
        used: list[bool] | None,
        *,
        last: bool,
    ) -> torch.futures.Future[torch.Tensor]:
        release = self.release if current.steps else None
        if release is not None and used is not None:
            current.only_bucket = last and current.buckets == 1
            release.hand_over(current, bucket.gradients, used)
        done = self._by_bucket.take(worker, current, bucket, last=last)
        if release is not None:
            release.limit_backward(done, bucket.gradients.buffer.device)
        return done

    def wait(self, timeout: float | None = None) -> StepReport:
        """Return the last report, when every rank has come as far; raise the first error."""
        if self._agreement is not None:
            done = threading.Event()
            self._agreement.add_done_callback(lambda _: done.set())
            if not done.wait(timeout):
                raise TimeoutError(f"a peer has not finished its step within {timeout:g} s")
        self.raise_error()
        self.require_complete()
        return self._report

    def raise_error(self) -> None:
        """Raise the first error that there was, if there was one."""
        self._failure.raise_if_any(self._progress())

    def require_complete(self) -> None:
        """Raise if a backward pass has begun to hand over buckets and has not ended."""
        if self._pass is not None and self._pass.steps:
            self._by_bucket.wait()  # what is in progress ends first, or the report would miss it
            self._pass.cancel()
            self.raise_error()
            raise StepError(
                f"the backward pass ended after {self._pass.buckets} buckets, with an error or because "
                "parameters got no gradient, which DDP allows with find_unused_parameters=True only",
                self._pass.report(),
            )

    @contextlib.contextmanager
    def refusing_passes(self) -> Iterator[None]:
        """While a closure runs whose step the last backward pass has done: another one would step twice."""
        self._stepped_before_closure = True
        try:
            yield
        finally:
            self._stepped_before_closure = False

    def refuse_inside_pass(self) -> None:
        """Raise if this thread runs a backward pass that steps.

        Raises:
            ConfigError: It does.
        """
        if self._pass is not None and self._pass.steps and inside_backward():
            raise ConfigError(
                "remove() inside backward(), which may have stepped some parameters: call it afterwards"
            )

    def remove(self) -> None:
        """From now on only average."""
        if not self.gradients.step_is_newest:  # else step() is still to come, unless a gradient comes first
            self.gradients.stop()
        if self._watch is not None:
            self._watch.end()
        if self.release is not None:
            self.release.restore()
        self.gradients.forget_used()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self._failure.forget_worker()
        self.buckets.forget()
        self._pass = None

    def _used(self, parameters: Sequence[torch.Tensor]) -> list[bool] | None:
        """Return which parameters of a bucket got a gradient here, if anybody asks."""
        if self._unused_possible or self._whole is not None or self.release is not None:
            return [self.gradients.has_come(parameter) for parameter in parameters]
        return None

    def _require_observed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if a parameter would count as unused because nobody has looked."""
        if self._unused_possible and not self.gradients.watches(parameters):
            raise ConfigError(
                "DDP averages a parameter that the model did not have when overlap_optimizer was called: "
                "remove() the overlap and make a new one"
            )

    def _begin(self) -> None:
        self._pass = None
        self._by_bucket.begin()
        if self._whole is not None:
            self._whole.begin()
        if self._worker is None:
            return
        self.raise_error()
        self._unused_possible = self._ask_unused_possible()
        try:
            self._worker.agree()
        except (AgreementError, dist.DistError) as error:
            raise ConfigError(text_of(error)) from error
        if self.paused:
            return
        # Under join() a rank without data calls its hook outside of any backward pass: it takes part
        # in the communication, and does not step, as it does not in the ordinary loop.
        steps = inside_backward()
        if steps and self._stepped_before_closure:
            raise ConfigError(
                "backward() has stepped before step(closure), and the closure's backward() would step again: "
                "let the closure call the only backward(), or call handle.pause() around the other one"
            )
        if steps:
            self.contents.clear()
            self._stepper.begin(self)
            if self.release is not None:
                self.release.begin(self.averaged)
            if self._watch is not None:
                self._watch.begin()
        self.passes += steps
        self._pass = BackwardPass(self.passes, steps)
        if steps:
            then = (lambda: None) if self.release is None else partial(self._drop_gradients, self._pass)
            after_backward(CancelUnlessCalled(self._pass, then))

    def _drop_gradients(self, current: BackwardPass) -> None:
        if self._watch is not None:
            self._watch.end()  # it would not let .grad be written
        if self.release is not None:
            self.release.end(current)

    def _terms(self) -> dict[str, object]:
        hook = getattr(self._comm_hook, "__qualname__", type(self._comm_hook).__qualname__)
        return {
            "mode": "bucket" if self._whole is None else "after_reduce",
            "communication hook": hook,
            "unused parameters are told": self._unused_possible,
            **self._stepper.terms(),
        }

    def _end_of_buckets(self, current: BackwardPass, device: torch.device) -> None:
        if current.steps:
            after_backward(partial(self._finish, current, device))
        averages = [] if self._whole is None else self._whole.take_averages()
        if averages and self._worker is not None and device.type == "cpu":
            # Its error ends the group: peers notice.
            self._worker.submit(partial(wait_for_all, averages), name=f"{_NAME}:averages")
        if not current.steps or self._whole is None:
            self._meet_peers(current, device)

    def _finish(self, current: BackwardPass, device: torch.device) -> None:
        if self._watch is not None:
            self._watch.end()
        if self._whole is not None:
            self._step_whole(self._whole, current, device)
            self._meet_peers(current, device)
        current.norm = self._stepper.norm
        self._report = current.report()
        self._pass = None
        self.gradients.step_is_newest = True
        self._stepper.finish(self)

    def _step_whole(self, whole: WholeStep, current: BackwardPass, device: torch.device) -> None:
        try:
            whole.step(current, device)
        except StepError as error:
            failure = self._first_of(error)
            # On an accelerator the peers do not wait, and a job would make this rank alone make a group.
            if self._worker is not None and device.type == "cpu":
                self._worker.submit(partial(raise_error, failure))  # which tells the peers
            cause = error.__cause__
            if cause is not None and not isinstance(cause, Exception):  # an interrupt, or an exit
                raise cause from None
            raise failure from cause
        whole.keep_contents()

    def _meet_peers(self, current: BackwardPass, device: torch.device) -> None:
        if self._worker is not None and device.type == "cpu":
            self._agreement = self._worker.submit(partial(meet_peers, current), name=f"{_NAME}:meet_peers")

    def _communicate(self, bucket: GradBucket, current: BackwardPass) -> torch.futures.Future[Any]:
        try:
            reduced = self._comm_hook(self._comm_state, bucket)
            if not callable(getattr(reduced, "then", None)):
                raise TypeError(f"it must return a future, got {type(reduced).__name__}")  # noqa: TRY301
        except Exception as error:
            current.cancel()
            text = f"the communication hook failed for bucket {bucket.index()}: {text_of(error)}"
            raise self._first_of(CommunicationError(text, current.report())) from error
        return reduced

    def _first_of(self, error: OverlapError) -> OverlapError:
        return self._failure.keep(error, self._progress())

    def _progress(self) -> StepReport:
        """Return what the running pass has stepped until now, or the last one."""
        return self._report if self._pass is None else self._pass.report()
