"""The engine of an overlap: it has the buckets of each backward pass averaged and stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.backward_pass import BackwardPass, CancelUnlessCalled, Passes
from ddp_optim_overlap.bucket_gradients import KnownBuckets
from ddp_optim_overlap.bucket_queue import WORTH_A_STEP, BucketQueue
from ddp_optim_overlap.bucket_steps import BucketSteps
from ddp_optim_overlap.called_hook import CalledHook
from ddp_optim_overlap.errors import CommunicationError, ConfigError, OverlapError, StepError, text_of
from ddp_optim_overlap.failed_futures import failed_future
from ddp_optim_overlap.first_error import FirstError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_release import GradientRelease
from ddp_optim_overlap.gradient_watch import GradientWatch
from ddp_optim_overlap.handed_over import HandedOver
from ddp_optim_overlap.pass_end import PassEnd
from ddp_optim_overlap.released_pass import ReleasedPass
from ddp_optim_overlap.report import StepReport
from ddp_optim_overlap.stepper import Stepper
from ddp_optim_overlap.used_parameters import UsedParameters
from ddp_optim_overlap.weight_reuse import WeightWatch
from ddp_optim_overlap.whole_step import WholeStep
from dist_utils import AgreementError, OrderedWorker
from dist_utils.comm_hooks import is_pair
from dist_utils.torch_compat import GradBucket, after_backward, in_final_callback, inside_backward

__all__ = ["Engine"]

_NAME = "ddp-optim-overlap"
"""The name of the worker, and the prefix of its jobs' ranges in a profiler."""


class Engine:
    """Passes the buckets of backward passes on to be averaged, and then to be stepped.

    Args:
        process_group: The process group whose ranks train together.
        parameters: The parameters of the model, including frozen ones, which may be unfrozen later.
        stepper: Steps with averaged gradients.
        comm_hook: Any communication hook; it averages.
        comm_state: Its first argument.
        unused_possible: Returns whether parameters may be left out of a backward pass. Then the ranks tell
            each other which parameters got a gradient. Called when a pass begins.
        model: A weak reference to the model; ``None`` if it is unknown.
        check: Watch for stepped weights that the same backward pass reads.
        release: Frees the gradients of every bucket after its step.
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
        model: weakref.ref[DistributedDataParallel] | None = None,
        check: bool = False,
        release: GradientRelease | None = None,
    ) -> None:
        self.gradients = GradientWatch(parameters)
        self.release = release
        if release is not None and not release.memory.stays_readable:
            self.gradients.tell(release.memory.restore)
        self.contents = GradientContents()
        self.paused = False
        self.averaged: set[torch.Tensor] = set()
        """The parameters whose gradients have been in a bucket."""
        self._stepper = stepper
        self._watch = WeightWatch() if check else None
        self.known_buckets = KnownBuckets()
        worker = OrderedWorker(process_group, name=_NAME, terms=self._terms)
        self._worker: OrderedWorker | None = worker
        self._passes = Passes()
        self._failure = FirstError(worker, self._passes.report)
        self._hook = CalledHook(comm_hook, comm_state, self._failure)
        # A watch must find whatever may happen in any run, and memory is freed as early as possible.
        waits = self._watch is None and release is None
        steps = BucketSteps(stepper, self.contents)
        self._queue = BucketQueue(steps.step, _NAME, WORTH_A_STEP if waits else 0)
        self._whole = WholeStep(stepper, self.contents, self._failure) if stepper.whole else None
        self._end = PassEnd(worker, _NAME, self._failure, self._whole)
        always = stepper.whole or release is not None
        self._used = UsedParameters(self.gradients, unused_possible, always=always)
        self._model = model

    @property
    def removed(self) -> bool:
        """Whether :meth:`remove` was called."""
        return self._worker is None

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the communication hook for one bucket."""
        if is_pair(bucket):
            raise ConfigError(
                "the overlapped step needs buckets, and DDP's Python reducer has none: set "
                "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
            )
        try:
            return self._take(bucket)
        except OverlapError as error:
            if isinstance(error, CommunicationError) and self._worker is not None:
                self._worker.fail(error)  # which tells the peers, without a wait for any of them
            refusal = self._failure.refuse(error)
            self._queue.give_up(refusal)
            if self._ddp_sends_last():  # to peers that may wait for this bucket
                raise
            # Raised here, it would leave DDP in the middle of a pass, and the model unusable.
            return failed_future(refusal)

    def _ddp_sends_last(self) -> bool:
        """Return whether DDP may send its record of used parameters after the last hook.

        A peer may still wait for a bucket: Gloo aborts a process that receives a message of another size.
        """
        model = None if self._model is None else self._model()
        return model is None or (model.find_unused_parameters and not model.static_graph)

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._failure.refusal = None
            self._begin()
        if self._failure.refusal is not None:
            return failed_future(self._failure.refusal)
        current, last = self._passes.running, bucket.is_last()
        if current is None or self._worker is None:
            self.gradients.take_as_new(bucket.parameters())
            if last:
                self.gradients.forget_arrivals()
            return self._hook.only_average(bucket)
        current.buckets += 1
        gradients = self.known_buckets.gradients(bucket)
        if not self.averaged.issuperset(gradients.parameters):
            self.averaged.update(gradients.parameters)
        used = self._used.of(gradients.parameters)
        if last:
            self.gradients.forget_arrivals()
        reduced = self._hook.start(bucket, current)
        if current.released is not None and used is not None:
            current.released.hand_over(gradients, used, last=last)
        if self._whole is None:
            told = used if self._used.told else None
            handed_over = HandedOver(bucket.index(), gradients, told, reduced)
            done = self._queue.take(self._worker, current, handed_over, last=last)
        else:
            everything = used is not None and all(used)
            done = self._whole.take(current, bucket.index(), gradients, reduced, used=everything)
        if last:
            self._end.follow_last_bucket(current, gradients.buffer.device, self._finish)
        return done

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has got here; return the last report, or raise the first error."""
        self._end.wait_for_peers(timeout)
        self.raise_error()
        self.require_complete()
        return self._passes.last

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        self._failure.raise_if_any()

    def require_complete(self) -> None:
        """Raise if a backward pass has begun to hand over buckets and has not ended.

        Raises:
            ConfigError: It is still running.
            StepError: It has failed.
        """
        current = self._passes.running
        if current is not None and current.steps:
            if current.runs:
                raise ConfigError(
                    "step() or wait() while backward() runs, in one of its hooks or in another thread: call "
                    "it when backward() has returned"
                )
            self._queue.wait()  # steps in progress end first, or the report would miss them
            current.cancel()
            current.end()
            self.raise_error()
            raise StepError(
                f"the backward pass ended after {current.buckets} buckets, with an error or because "
                "parameters got no gradient, which DDP allows with find_unused_parameters=True only",
                current.report(),
            )

    def refuse_inside_pass(self) -> None:
        """Raise if a backward pass that steps is running, in this thread or another one.

        Raises:
            ConfigError: One is.
        """
        current = self._passes.running
        if current is not None and current.steps and (current.runs or inside_backward()):
            raise ConfigError(
                "remove() inside backward(), or while another thread runs it, which may have stepped some "
                "parameters: call it afterwards"
            )

    def remove(self) -> None:
        """Stop stepping; only average from now on."""
        if not self.gradients.step_is_newest:  # otherwise step() is still to come
            self.gradients.stop()
        if self._watch is not None:
            self._watch.end()
        self.gradients.forget_used()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
            self._failure.forget_worker()
            self._end.forget_worker()
        if self.release is not None:  # now that no job frees memory any more
            self.release.memory.restore()
        self.known_buckets.forget()
        self._queue.forget()
        if not self.gradients.step_is_newest:
            self.contents.clear()
        self._passes.running = None

    def _begin(self) -> None:
        left, self._passes.running = self._passes.running, None
        if left is not None and not in_final_callback():  # it failed inside another pass
            left.end()
        self._queue.forget()
        if self._whole is not None:
            self._whole.begin()
        worker = self._worker
        if worker is None:
            return
        self.raise_error()
        self._used.begin()
        try:
            worker.agree()
        except (AgreementError, dist.DistError) as error:
            raise ConfigError(text_of(error)) from error
        if self.paused:
            return
        # Under join() a rank without data calls its hook outside of any backward pass: it takes part in the
        # communication but does not step, as in the ordinary loop.
        steps = inside_backward()
        if steps:
            self._begin_to_step()
        current = self._passes.begin(steps=steps)
        if steps:
            current.watch = self._watch
            current.released = None if self.release is None else ReleasedPass(self.release)
        if self._whole is None:
            self._queue.begin(worker, current)
        if steps:
            after_backward(CancelUnlessCalled(current))

    def _begin_to_step(self) -> None:
        self.contents.clear()
        self._stepper.begin(self)
        if self.release is not None:
            self.release.require_possible(self.averaged)
        if self._watch is not None:
            self._watch.begin()

    def _terms(self) -> dict[str, object]:
        return {
            "mode": "bucket" if self._whole is None else "after_reduce",
            "communication hook": self._hook.name,
            "unused parameters are told": self._used.told,
            **self._stepper.terms(),
        }

    def _finish(self, current: BackwardPass) -> None:
        self._queue.finish()
        current.norm = self._stepper.norm
        self._passes.finish(current)
        self.gradients.step_is_newest = True
        self._stepper.finish(self)
