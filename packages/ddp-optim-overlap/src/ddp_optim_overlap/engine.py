"""What happens to one bucket, from the communication hook to the stepped parameters."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_compress_hooks.compiled import is_pair
from ddp_optim_overlap.backward_pass import BackwardPass, CancelUnlessCalled
from ddp_optim_overlap.bucket_gradients import BucketGradients, average_of, lent
from ddp_optim_overlap.bucket_jobs import (
    as_outside_of_backward,
    failed,
    meet_peers,
    not_averaged,
    raise_error,
    text_of,
    used_anywhere,
    wait_for_all,
)
from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    OverlapError,
    StepError,
    UnsupportedOptimizerError,
)
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.gradient_watch import GradientWatch
from ddp_optim_overlap.report import StepReport
from ddp_optim_overlap.weight_reuse import WeightWatch
from dist_utils import AgreementError, OrderedWorker
from dist_utils.torch_compat import GradBucket, after_backward, inside_backward

__all__ = ["Engine", "Stepper"]


class Stepper:
    """What an engine steps with.

    Attributes:
        whole: Whether :meth:`step` is called once, without parameters, when DDP has written all averages
            into ``.grad``; else for every bucket.
        norm: The norm that :meth:`step` has computed on the way.
        begun: If ``whole``, the steps of how many optimizers have begun, in their order.
        changes_gradients: If ``whole``, whether :meth:`step` scales gradients before it uses them.
    """

    whole = False
    changes_gradients = False
    norm: torch.Tensor | None = None
    begun = 1

    def terms(self) -> dict[str, object]:
        """Return what must be alike on all ranks."""
        return {}

    def begin(self, engine: Engine) -> None:
        """A backward pass hands over its first bucket, before any communication. May raise."""

    def step(self, parameters: Sequence[torch.Tensor]) -> None:
        """Step those of ``parameters`` that are to be stepped, with their ``.grad``."""
        raise NotImplementedError

    def finish(self, engine: Engine) -> None:
        """A backward pass that has stepped is over."""


class Engine:
    """The state of the overlapped hook: hands buckets on to be averaged and, averaged, to be stepped.

    Args:
        process_group: Whose ranks train together.
        parameters: Of the model; frozen ones too, which may be unfrozen later.
        stepper: What to do with averaged gradients.
        comm_hook: Averages; any hook.
        comm_state: Its first argument.
        unused_possible: Returns whether parameters may be left out of a backward pass. Then the ranks tell
            each other which ones got a gradient. Asked when a pass begins.
        check: Watch for stepped weights that the same backward pass reads.
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
    ) -> None:
        self.gradients = GradientWatch(parameters)
        self.contents = GradientContents()
        self.paused = False
        self.averaged: set[torch.Tensor] = set()
        """Whose gradients have been in a bucket."""
        self._stepper = stepper
        self._comm_hook = comm_hook
        self._comm_state = comm_state
        self._ask_unused_possible = unused_possible
        self._unused_possible = False
        self._watch = WeightWatch() if check else None
        self._worker: OrderedWorker | None = OrderedWorker(
            process_group, name="ddp-optim-overlap", terms=self._terms
        )
        self._pass: BackwardPass | None = None
        self._passes = 0
        self._report = StepReport()
        self._error: OverlapError | None = None
        self._refused: OverlapError | None = None
        self._averages: list[torch.futures.Future[torch.Tensor]] = []
        self._buckets: list[tuple[BucketGradients, bool]] = []
        self._last_job: torch.futures.Future[torch.Tensor] | None = None
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
            self._refused = error
            return failed(error)

    def _take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            self._refused = None
            self._begin()
        if self._refused is not None:  # the ranks' collectives would not match any more
            return failed(self._refused)
        current, last = self._pass, bucket.is_last()
        if current is None or self._worker is None:
            self.gradients.averaged_anew(bucket.parameters())
            if last:
                self.gradients.new.clear()
            return self._comm_hook(self._comm_state, bucket).then(partial(average_of, bucket.buffer()))
        current.buckets += 1
        gradients = BucketGradients(bucket)
        self.averaged.update(gradients.parameters)
        self._require_observed(gradients.parameters)
        used = [self.gradients.is_new(parameter) for parameter in gradients.parameters]
        if last:
            self.gradients.new.clear()
        reduced = self._communicate(bucket, current)
        if self._stepper.whole:
            # A callback may be dropped last by Gloo's thread, which must not end its own process group.
            first_of: weakref.WeakMethod[Any] = weakref.WeakMethod(self._first_of)
            done = reduced.then(partial(_written, first_of, current, bucket.index(), gradients))
            self._averages.append(done)
            self._buckets.append((gradients, all(used)))
        else:
            job = partial(self._step_bucket, current, bucket.index(), gradients, used, reduced)
            done = self._last_job = self._worker.submit(job, device=gradients.buffer.device)
        if last:
            self._end_of_buckets(current, gradients.buffer.device)
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
        error = self._first_error() or self._refused
        if error is not None:
            raise error

    def require_complete(self) -> None:
        """Raise if a backward pass has begun to hand over buckets and has not ended."""
        if self._pass is not None and self._pass.steps:
            if self._last_job is not None:
                with contextlib.suppress(Exception):
                    self._last_job.wait()  # what is in progress ends first, or the report would miss it
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
        if not self.gradients.step_stands:  # else step() is still to come, unless a gradient comes first
            self.gradients.stop()
        if self._watch is not None:
            self._watch.end()
        self.gradients.forget()
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
        self._pass = None

    def _require_observed(self, parameters: Sequence[torch.Tensor]) -> None:
        """Raise if a parameter would count as unused because nobody has looked."""
        if self._unused_possible and not self.gradients.watches(parameters):
            raise ConfigError(
                "DDP averages a parameter that the model did not have when overlap_optimizer was called: "
                "remove() the overlap and make a new one"
            )

    def _begin(self) -> None:
        self._pass = None
        self._averages, self._buckets = [], []
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
            if self._watch is not None:
                self._watch.begin()
        self._passes += steps
        self._pass = BackwardPass(self._passes, steps)
        if steps:
            after_backward(CancelUnlessCalled(self._pass))

    def _terms(self) -> dict[str, object]:
        hook = getattr(self._comm_hook, "__qualname__", type(self._comm_hook).__qualname__)
        return {
            "mode": "after_reduce" if self._stepper.whole else "bucket",
            "communication hook": hook,
            "unused parameters are told": self._unused_possible,
            **self._stepper.terms(),
        }

    def _end_of_buckets(self, current: BackwardPass, device: torch.device) -> None:
        if current.steps:
            after_backward(partial(self._finish, current, device))
        averages, self._averages = self._averages, []
        if averages and self._worker is not None and device.type == "cpu":
            self._worker.submit(partial(wait_for_all, averages))  # its error ends the group: peers notice
        if not (current.steps and self._stepper.whole):
            self._meet_peers(current, device)

    def _finish(self, current: BackwardPass, device: torch.device) -> None:
        if self._watch is not None:
            self._watch.end()
        if self._stepper.whole:
            self._step_whole(current, device)
            self._keep_contents()
            self._meet_peers(current, device)
        current.norm = self._stepper.norm
        self._report = current.report()
        self._pass = self._last_job = None  # the job's future has a bucket, which DDP may be about to replace
        self.gradients.step_stands = True
        self._stepper.finish(self)

    def _meet_peers(self, current: BackwardPass, device: torch.device) -> None:
        if self._worker is not None and device.type == "cpu":
            self._agreement = self._worker.submit(partial(meet_peers, current))

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

    def _step_bucket(
        self,
        current: BackwardPass,
        index: int,
        gradients: BucketGradients,
        used: list[bool],
        reduced: torch.futures.Future[Any],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Wait for the average and step with it; on the worker or, on an accelerator, on its stream."""
        try:
            if self._unused_possible:
                used = used_anywhere(used, group, gradients.buffer.device)
            gradients.write(current.await_bucket(reduced))
        except Exception as error:
            raise not_averaged(index, error, current) from error
        if current.steps:
            with current.stepping:
                if not current.cancelled:
                    self._step(
                        current, index, gradients, used if self._unused_possible else [True] * len(used)
                    )
        return gradients.buffer

    def _step(self, current: BackwardPass, index: int, gradients: BucketGradients, used: list[bool]) -> None:
        parameters, device = gradients.parameters, gradients.buffer.device
        averaged = [
            # A parameter that no rank has used keeps what it had before: nothing, or zeros.
            view if is_used else parameter.grad
            for parameter, view, is_used in zip(parameters, gradients.views, used, strict=True)
        ]
        began = time.perf_counter()
        try:
            with as_outside_of_backward(device), lent(parameters, averaged) as own:
                self._stepper.step(parameters)
                self.contents.keep(parameters, averaged, own, gradients.buffer)
        except BaseException as error:  # sys.exit() too: it would end a thread, and nobody would know
            current.partial = (index,)
            kind = type(error) if isinstance(error, UnsupportedOptimizerError) else StepError
            raise kind(f"the step of bucket {index} failed: {text_of(error)}", current.report()) from error
        current.count_step([index], time.perf_counter() - began, on_host=device.type == "cpu")
        if self._watch is not None:
            self._watch.stepped(parameters)

    def _step_whole(self, current: BackwardPass, device: torch.device) -> None:
        """Step everything when ``backward()`` has nothing else left to do."""
        began = time.perf_counter()
        try:
            with as_outside_of_backward(device):
                self._stepper.step(())
        except BaseException as error:
            begun = self._stepper.begun
            current.partial = tuple(range(current.buckets if begun else 0))
            current.optimizers = tuple(range(begun - 1))
            failure = self._first_of(StepError(f"the step failed: {text_of(error)}", current.report()))
            # On an accelerator the peers do not wait, and a job would make this rank alone make a group.
            if self._worker is not None and device.type == "cpu":
                self._worker.submit(partial(raise_error, failure))  # which tells the peers
            if not isinstance(error, Exception):  # an interrupt, or an exit
                raise
            raise failure from error
        if self._stepper.begun:  # a scaler that has found an infinity skips the step
            current.count_step(range(current.buckets), time.perf_counter() - began, on_host=False)

    def _keep_contents(self) -> None:
        """Keep what gradients are after a step of all: what the buckets have, unless it was changed since."""
        for gradients, used in self._buckets:
            own = [parameter.grad for parameter in gradients.parameters]
            if used and not self._stepper.changes_gradients:
                self.contents.keep(gradients.parameters, gradients.views, own, gradients.buffer)
            else:
                self.contents.keep_own(gradients.parameters)
        self._buckets = []

    def _first_of(self, error: OverlapError) -> OverlapError:
        """Return this error if it is the first; it is kept then."""
        self._error = self._first_error() or error
        return self._error

    def _first_error(self) -> OverlapError | None:
        error = self._error or (None if self._worker is None else self._worker.error)
        if error is not None and not isinstance(error, OverlapError):
            report = self._report if self._pass is None else self._pass.report()
            self._error = CommunicationError(str(error), report)
            self._error.__cause__ = error
            return self._error
        return error


def _written(
    first_of: weakref.WeakMethod[Any],
    current: BackwardPass,
    index: int,
    gradients: BucketGradients,
    reduced: torch.futures.Future[Any],
) -> torch.Tensor:
    """Put the average of a bucket that is not stepped by itself where DDP looks for it."""
    try:
        gradients.write(reduced.value())
    except Exception as error:
        failure, first = not_averaged(index, error, current), first_of()
        raise failure if first is None else first(failure) from error
    return gradients.buffer
