"""The engine of an overlap: begins backward passes, has their buckets averaged and stepped, and ends them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError, OverlapError, StepError, StepReport, kind_of_failure
from ddp_optim_overlap.model import (
    averaged_parameters,
    may_leave_out,
    require_all_ranks,
    require_ddp_options,
    require_one_first_bucket,
)
from ddp_optim_overlap.optimizers.stepper import Stepper
from ddp_optim_overlap.passes.averaging import plain_average
from ddp_optim_overlap.passes.backward_pass import BackwardPass, PassState, TaskMark, is_inside_node
from ddp_optim_overlap.passes.bucket import Bucket, KnownBuckets, average_of
from ddp_optim_overlap.passes.gradient_watch import GradientWatch
from ddp_optim_overlap.passes.peers import NAME, Peers
from ddp_optim_overlap.passes.release import IN_FLIGHT, GradientRelease
from dist_utils import AgreementError, OrderedWorker, require_same_terms
from dist_utils.comm_hooks import CommHook, completed_future, failed_future, is_pair
from dist_utils.process_groups import error_text, runs_on_host, same_error
from dist_utils.torch_compat import (
    GradBucket,
    after_backward,
    at_end_of_backward,
    graph_task_id,
    inside_backward,
)


class Engine:
    """Passes the buckets of backward passes on to be averaged, and then steps them.

    A communication hook does not know when its average will be there, but the thread of ``backward()`` waits
    for all of them at its end. There, before DDP does, it waits for one after the other, and steps. On an
    accelerator each step is enqueued by the hook, on a side stream behind the average.

    The first error is kept, and raised again by every later call until :meth:`remove`.

    Args:
        model: The model, which is not kept alive.
        stepper: Steps with averaged gradients.
        comm_hook: Any communication hook; it averages. ``None``: as DDP does without one.
        comm_state: Its first argument.
        skips_unused: Whether a parameter that no rank has used is left alone. Where some may be unused, the
            ranks then share which parameters got a gradient.
        release: Frees the gradients of every bucket after its step.
        passes: How many backward passes earlier engines of the model have begun or refused.

    Attributes:
        gradients: Which gradients have come.
        paused: Whether passes only average.
        passes: How many backward passes were begun or refused, earlier engines' among them.
        report: What the newest pass that steps has stepped, once it has ended or failed.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        stepper: Stepper,
        comm_hook: CommHook | None,
        comm_state: object,
        *,
        skips_unused: bool = False,
        release: GradientRelease | None = None,
        passes: int = 0,
    ) -> None:
        averaged = averaged_parameters(model)  # frozen ones may be unfrozen later
        self.gradients = GradientWatch(averaged, None if release is None else release.memory.restore)
        self._known_buckets = KnownBuckets(model.parameters())
        self._release = release
        self.paused = False
        self.report = StepReport()
        self._stepper = stepper
        self._comm_hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
        self._comm_hook, self._averages_like_ddp = comm_hook or plain_average(model), comm_hook is None
        self._process_group = group = model.process_group
        self._comm_state = group if comm_hook is None else comm_state
        self._model = weakref.ref(model)
        self._allocates_buckets = getattr(model, "lazy_bucket_allocation", False)
        self._skips_unused, self._shares_used = skips_unused, False
        worker = OrderedWorker(group, name=NAME, terms=self._terms)
        self._worker: OrderedWorker | None = worker
        self._peers = Peers(worker)
        self._current = BackwardPass(stepper, PassState.ENDED)  # there is none yet
        self._error: Exception | None = None
        self._failed = False
        self.passes = passes

    # ---- the first error, and the end of the overlap ----

    @property
    def is_removed(self) -> bool:
        """Whether :meth:`remove` was called."""
        return self._worker is None

    @property
    def is_idle(self) -> bool:
        """Whether there was no error, and no pass runs that steps."""
        return self._error is None and self._current.state is not PassState.STEPS

    def raise_error(self) -> None:
        """Raise a copy of the first error, if there was one.

        A copy, because errors that are raised get frames, which hold the caller's model; and the model's
        reducer, of which the garbage collector knows nothing, holds this engine.
        """
        if self._error is not None:
            raise same_error(self._error)

    def fail(self, error: OverlapError) -> Exception:
        """Keep an error as the first one, unless there was one before; return the first, to be raised.

        The peers hear of it without a wait for any of them: the worker's private group ends. After
        :meth:`remove` nothing is kept.
        """
        if self.is_removed:
            return error
        self._error = self._error or same_error(error)
        self._peers.fail(error)
        return same_error(self._error)

    def remove(self) -> None:
        """Stop stepping; only average from now on, if the model still exists."""
        self._stepper.remove(self.gradients)
        failed, self._error = self._error is not None, None  # what failed before no longer counts
        self._failed |= failed  # if called twice, too
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        self._current.end()
        if self._release is not None:
            self._release.memory.restore()
        self._known_buckets.forget()
        if failed and self._model() is not None:  # else its parameters may be another model's now
            self._known_buckets.drop_gradients()
            self._current.await_averages()
        self._current = BackwardPass(self._stepper, PassState.AVERAGES)

    # ---- one bucket ----

    def hook(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the communication hook for one bucket."""
        if is_pair(bucket):
            raise ConfigError(
                "the overlapped step needs buckets, and DDP's Python reducer has none: set "
                "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
            )
        try:
            if bucket.index() == 0:
                self._begin(bucket.buffer().device)
            if self._current.state is not PassState.REFUSES:
                return self._average(self._current, bucket)
        except Exception as error:
            if self.is_removed and not isinstance(error, OverlapError):
                raise  # as without an overlap
            self._fail(self._current, error)
            self._current.state = PassState.REFUSES
            if self._ddp_sends_last():  # to peers that may wait for this bucket
                _raise(self._current.pop_failure())
        # An error that is raised here would leave DDP in the middle of a pass, and the model unusable.
        return self._pass_on(self._current, bucket)

    def _begin(self, device: torch.device) -> None:
        """Begin a backward pass; raises before any communication if it cannot be averaged and stepped."""
        self.passes += 1
        self._abandon()
        worker, model = self._worker, self._model()
        # Under join() a rank without data calls its hook outside of any backward pass: it takes part in the
        # communication but does not step, as in the ordinary loop.
        steps = not self.paused and worker is not None and inside_backward()
        state, number = (PassState.STEPS, self.report.number + 1) if steps else (PassState.AVERAGES, 0)
        self._current = current = BackwardPass(self._stepper, state, number, self._current.pace)
        if model is not None and self._averages_like_ddp:
            require_all_ranks(model)
        if worker is None:
            self._compare_after_error()
            return
        self._await_peers()
        self.raise_error()
        if model is not None:
            require_ddp_options(model)
            if not self._known_buckets.parameters:  # the graph may be made static until the first pass
                require_one_first_bucket(model)
            self._shares_used = self._skips_unused and may_leave_out(model)
        _require_agreement(lambda: worker.process_group)  # not destroyed
        _require_agreement(worker.agree)
        self._peers.connect(device)
        if steps:
            self._follow_task(current)  # from here on, others ask whether the pass runs
            self._stepper.begin()
            current.steps_unused = not self._skips_unused and model is not None and may_leave_out(model)
            averaged = self._known_buckets.parameters
            if averaged:  # else this is the first pass, whose last bucket shows
                self._stepper.require_averaged(averaged)
            if self._release is not None:
                self._release.require_possible(averaged)
                current.released = self._release

    def _compare_after_error(self) -> None:
        """Raise if ranks that have removed a failed overlap go on with different iterations."""
        if self._failed:
            self._failed = False
            title, terms = f"{NAME} was removed after an error", self._progress()
            _require_agreement(lambda: require_same_terms(self._process_group, title, terms))

    def _progress(self) -> dict[str, object]:
        return {"backward passes of the model": self.passes}

    def _average(self, current: BackwardPass, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Have a bucket averaged and, if the pass steps, stepped; return the future for DDP."""
        if self.paused or self.is_removed:
            self.gradients.mark_as_new(bucket.parameters())
        if self._worker is None:
            return self._comm_hook(self._comm_state, bucket).then(partial(average_of, bucket.buffer()))
        self._follow_task(current)
        known, last = self._known_buckets.find(bucket), bucket.is_last()
        if last:
            self._stepper.require_averaged(self._known_buckets.parameters)
        used: list[bool] = []
        if self._shares_used or current.released is not None:
            used = [self.gradients.has_come(parameter) for parameter in known.parameters]
        known.begin(self._start_average(bucket), used if self._shares_used else None)
        current.hand_over(known)
        if current.released is not None:
            current.released.begin(known, used, last=last)
        if last:
            current.is_complete = True
            self.gradients.forget_arrivals()
            # DDP rebuilds its buckets after the first pass, and with lazy_bucket_allocation (torch 2.15) it
            # has buffers only during a backward pass.
            if self.passes == 1 or self._allocates_buckets:
                self._known_buckets.forget()
        return self._step(current, known, last=last)

    def _step(
        self, current: BackwardPass, known: Bucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Step a bucket when it is averaged, if the pass steps; return the future for DDP."""
        if not runs_on_host(self._process_group, known.buffer.device):
            done = self._step_behind_average(current, known)
        else:
            current.waiting.append(known)
            done = known.done
            if self._release is not None and not last:
                self._step_waiting(current, leave=IN_FLIGHT)
        if last and is_inside_node():
            at_end_of_backward(partial(self._step_hidden, current))
        elif last:  # DDP will not return to this thread: the first pass of a static graph, or join()
            self._step_hidden(current)
            if not inside_backward():
                self._step_rest(current)  # under join(): nobody calls :meth:`_finish`
        if current.failure is not None and not inside_backward():
            return failed_future(same_error(current.failure), known.buffer)
        return done

    def _start_average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the communication hook.

        Raises:
            CommunicationError: It has failed. The pass averages and steps no further.
            ConfigError: It has not returned a future, or ranks differ. Likewise.
        """
        try:
            averaged = self._comm_hook(self._comm_state, bucket)
        except Exception as error:
            text = f"the communication hook failed for bucket {bucket.index()}: {error_text(error)}"
            raise kind_of_failure(error)(text) from error
        if not callable(getattr(averaged, "then", None)):
            raise ConfigError(f"the communication hook must return a future, got {type(averaged).__name__}")
        return averaged

    def _step_waiting(self, current: BackwardPass, *, leave: int = 0) -> None:
        """Step buckets that wait. An error is kept; later buckets are averaged, as on the other ranks."""
        with self._errors_of(current):
            if current.failure is None:
                current.step_waiting(self._peers.share_used, leave=leave)
        if current.failure is not None:
            current.leave_waiting()

    def _step_hidden(self, current: BackwardPass) -> None:
        """Step what averages on their way hide, until DDP can have all buckets."""
        self._step_waiting(current)
        if not self._peers.on_host:
            self._meet(current)
        ends_alone = self._peers.on_host and self._ddp_sends_last() and inside_backward()
        if current.failure is not None and ends_alone:
            current.end()
            _raise(current.pop_failure())  # DDP would wait for ranks that may not come

    def _step_rest(self, current: BackwardPass) -> None:
        """Step what is left, and let the ranks meet."""
        with self._errors_of(current):
            current.step_rest()
        if self._peers.on_host:
            self._meet(current)

    def _meet(self, current: BackwardPass) -> None:
        """Let the ranks meet. An accelerator's meeting is enqueued before DDP waits for its last average."""
        with self._errors_of(current):
            self._peers.meet(self.passes, paused=self.paused, failed=current.failure is not None)

    @contextlib.contextmanager
    def _errors_of(self, current: BackwardPass) -> Iterator[None]:
        """Keep an error: raised here, it would leave DDP in the middle of a pass."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - backward() raises it at its end
            self._fail(current, error)

    def _step_behind_average(
        self, current: BackwardPass, known: Bucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Enqueue the step of a bucket on an accelerator, which waits for the average; the host does not."""
        buffer = known.buffer
        share = self._peers.share_used([known])
        if current.failure is not None or self._worker is None:
            return completed_future(buffer)

        def step(_: dist.ProcessGroup) -> torch.Tensor:
            results = [buffer]
            with self._errors_of(current):
                known.await_average()
                share()
                results = current.step_now([known])
            return results[0]

        done = self._worker.submit(step, device=buffer.device, name=f"{NAME}:bucket_{known.index}")
        if current.released is not None:
            current.released.limit_device()
        return done

    def _pass_on(self, current: BackwardPass, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future for DDP of a bucket that is not averaged: ``backward()`` raises at its end."""
        failure = current.failure
        if not inside_backward() and failure is not None:
            return failed_future(same_error(failure), bucket.buffer())
        # No bucket of a static graph's first pass may be the last one.
        if bucket.is_last() or not is_inside_node():
            current.is_complete = True
        self._follow_task(current)
        current.leave_waiting()
        return completed_future(bucket.buffer())

    def _ddp_sends_last(self) -> bool:
        """Return whether DDP may send its record of used parameters after the last hook.

        A peer may still wait for a bucket: Gloo aborts a process that receives a message of another size.
        """
        model = self._model()
        return model is not None and model.find_unused_parameters and not model.static_graph

    # ---- the end of a pass ----

    def _follow_task(self, current: BackwardPass) -> None:
        """Finish the pass at the end of the task that hands over its last bucket.

        That is after DDP, which waits for all buckets and copies averages into ``.grad``, and after what
        communication hooks do then: states with error feedback look at ``.grad`` to see which parameters no
        rank has used.
        """
        task = graph_task_id()
        if task == -1 or task in current.tasks:
            return
        mark = current.tasks[task] = TaskMark()
        after_backward(partial(after_backward, partial(self._finish, current, mark)))

    def _finish(self, current: BackwardPass, mark: TaskMark) -> None:
        del mark
        if not current.is_complete or current.state is PassState.ENDED:  # the end of a surrounding task
            return
        if self._worker is not None:
            self._step_rest(current)
        stepped = current.state is PassState.STEPS
        current.end()
        _raise(current.pop_failure())
        if stepped:
            self.report = current.report
            self._stepper.finish(self.gradients)

    def _fail(self, current: BackwardPass, cause: Exception) -> None:
        """Let nothing more of a pass be stepped; ``backward()`` raises the error when DDP has ended it.

        The one place for what fails while a pass runs, whatever it is.
        """
        error: OverlapError
        if isinstance(cause, OverlapError):
            error = cause
        else:
            error = StepError(f"the overlapped step failed: {error_text(cause)}")
            error.__cause__ = cause
        if current.number:
            self.report = current.report
            error = error.with_report(self.report)
        self.fail(error)
        current.failure = current.failure or error
        if current.state is PassState.STEPS:
            current.state = PassState.AVERAGES

    def _abandon(self) -> None:
        """End a pass that was left before it was finished, with an error: it steps nothing more."""
        current = self._current
        if current.state is PassState.STEPS:
            self._fail(
                current,
                StepError(
                    f"the backward pass ended after {current.report.buckets} buckets, with an error or as "
                    "parameters got no gradient, which DDP allows with find_unused_parameters=True only"
                ),
            )
        current.end()
        current.failure = None

    # ---- between passes ----

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has got here; return the last report, or raise the first error."""
        self.require_outside_pass()
        if not self.is_removed:
            self._await_peers(timeout)
        return self.report

    def _await_peers(self, timeout: float | None = None) -> None:
        """Wait until every rank has come to the meeting of the last pass; keep an error, with its report."""
        try:
            self._peers.wait(timeout)
        except OverlapError as error:
            raise self.fail(error.with_report(self.report)) from error.__cause__

    def require_outside_pass(self) -> None:
        """Raise the first error, or raise if a backward pass runs or was left.

        Raises:
            ConfigError: A backward pass runs, around this call or in another thread; it goes on.
            StepError: One has begun to hand over buckets, and has ended without an error and without
                handing over all.
        """
        self.refuse_inside_pass("step() or wait()")
        self.raise_error()

    def refuse_inside_pass(self, call: str) -> None:
        """Raise if a backward pass that steps is running, in this thread or another one.

        Raises:
            ConfigError: One is running.
        """
        current = self._current  # read once: another thread may begin the next one
        if current.state is not PassState.STEPS:
            return
        if current.tasks or inside_backward():
            raise ConfigError(
                f"{call} while backward() runs, in one of its hooks or in another thread: call it when "
                "backward() has returned"
            )
        self._abandon()

    def _terms(self) -> dict[str, object]:
        hook = self._comm_hook
        return {
            "communication hook": getattr(hook, "__qualname__", type(hook).__qualname__),
            "parameters may be unused": self._shares_used,
            "release_gradients": self._release is not None,  # then they ask for fewer buckets at once
            **self._progress(),
            **self._stepper.terms(),
        }


def _raise(failure: OverlapError | None) -> None:
    """Raise what has failed in a pass, if anything has: an interrupt stays one."""
    if failure is not None:
        cause = failure.__cause__
        raise failure if cause is None or isinstance(cause, Exception) else cause


def _require_agreement(compare: Callable[[], object]) -> None:
    try:
        compare()
    except (AgreementError, dist.DistError, ValueError) as error:  # the group may be destroyed
        raise kind_of_failure(error)(error_text(error)) from error
