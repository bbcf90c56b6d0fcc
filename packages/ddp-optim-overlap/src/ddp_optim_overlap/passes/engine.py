"""The engine of an overlap: begins backward passes, has their buckets averaged and stepped, and ends them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError, OverlapError, StepError, kind_of_failure
from ddp_optim_overlap.model import may_leave_out, require_ddp_options, require_one_first_bucket
from ddp_optim_overlap.passes.backward_pass import NAME, BackwardPass, PassKind, PassStage, Stepper
from ddp_optim_overlap.passes.bucket import Bucket, KnownBuckets, average_of
from ddp_optim_overlap.passes.gradient_watch import GradientWatch
from ddp_optim_overlap.passes.peers import Peers
from ddp_optim_overlap.passes.phase import OverlapState, Phase
from ddp_optim_overlap.passes.release import GradientRelease, ReleasedPass
from ddp_optim_overlap.passes.weight_reuse import WeightWatch
from ddp_optim_overlap.report import StepReport
from dist_utils import AgreementError, OrderedWorker, require_same_terms
from dist_utils.comm_hooks import CommHook, failed_future, is_pair
from dist_utils.process_groups import error_text, same_error
from dist_utils.torch_compat import (
    GradBucket,
    after_backward,
    at_end_of_backward,
    graph_task_id,
    inside_backward,
)


class Engine:
    """Passes the buckets of backward passes on to be averaged, and then to be stepped.

    Args:
        process_group: The process group whose ranks train together.
        stepper: Steps with averaged gradients.
        comm_hook: Any communication hook; it averages.
        comm_state: Its first argument.
        model: The model, which is not kept alive; ``None`` if it is unknown.
        skips_unused: Whether a parameter that no rank has used is left alone. Where some may be unused, the
            ranks then share which parameters got a gradient.
        check: Watch for stepped weights that the same backward pass reads.
        release: Frees the gradients of every bucket after its step.
        passes: How many backward passes earlier engines of the model have begun or refused.

    Attributes:
        state: What the overlap is doing.
        gradients: Which gradients have come.
        paused: Whether passes only average.
        passes: How many backward passes were begun or refused, earlier engines' among them.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        stepper: Stepper,
        comm_hook: CommHook | Callable[[Any, GradBucket], torch.futures.Future[Any]],
        comm_state: object,
        *,
        model: DistributedDataParallel | None = None,
        skips_unused: bool = False,
        check: bool = False,
        release: GradientRelease | None = None,
        passes: int = 0,
    ) -> None:
        parameters = [] if model is None else list(model.parameters())  # frozen ones may be unfrozen later
        self.gradients = GradientWatch(parameters, None if release is None else release.memory.restore)
        self._known_buckets = KnownBuckets(parameters, self.gradients.watch)
        self._release = release
        self.paused = False
        self._stepper = stepper
        self._comm_hook, self._comm_state = comm_hook, comm_state
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._skips_unused, self._shares_used = skips_unused, False
        self._check = check
        worker = OrderedWorker(process_group, name=NAME, terms=self._terms)
        self._worker: OrderedWorker | None = worker
        self._peers = Peers(worker)
        self.state = OverlapState(worker)
        self._current = BackwardPass(PassKind.PAUSED, self.state, stepper)
        self._current.end()  # there is none yet
        self._process_group, self._failed = process_group, False
        self.passes = passes

    # ---- one bucket ----

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Act as the communication hook for one bucket."""
        if is_pair(bucket):
            raise ConfigError(
                "the overlapped step needs buckets, and DDP's Python reducer has none: set "
                "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
            )
        try:
            if bucket.index() == 0:
                self._begin()
            elif self._worker is not None:
                self._current.require_next(bucket.index())
            return self._take(self._current, bucket)
        except Exception as error:
            failure = self._current.fail(_as_overlap_error(error))
            self._current.kind = PassKind.REFUSED
            if self._ddp_sends_last():  # to peers that may wait for this bucket
                raise
            # Raised here, it would leave DDP in the middle of a pass, and the model unusable.
            return failed_future(same_error(failure), bucket.buffer())

    def _begin(self) -> None:
        """Begin a backward pass; raises before any communication if it cannot be averaged and stepped."""
        self.passes += 1
        if self.state.phase is Phase.RUNNING:
            self._abandon(self._current)
        self._current.end()
        kind = self._kind_of_pass()
        number = self.state.report.number + 1 if kind is PassKind.STEPS else 0
        current = self._current = BackwardPass(kind, self.state, self._stepper, number)
        worker, model = self._worker, self._model()
        if worker is None:
            self._compare_after_error()
            return
        self._peers.wait()
        self.state.raise_error()
        if model is not None:
            require_ddp_options(model)
            if not self._known_buckets.parameters:  # the graph may be made static until the first pass
                require_one_first_bucket(model)
            self._shares_used = self._skips_unused and may_leave_out(model)
        _require_agreement(worker.agree)
        try:
            if kind is PassKind.STEPS:
                self._begin_to_step(worker, current)
            elif kind is PassKind.JOINED:
                self._stepper.join()
        except OverlapError:
            raise
        except Exception as error:  # noqa: BLE001 - a clip policy may raise anything
            current.fail(_as_overlap_error(error))  # and is averaged, for peers that have begun to step

    def _compare_after_error(self) -> None:
        """Raise if ranks that have removed a failed overlap go on with different iterations."""
        if self._failed:
            self._failed = False
            title, terms = f"{NAME} was removed after an error", self._progress()
            _require_agreement(lambda: require_same_terms(self._process_group, title, terms))

    def _progress(self) -> dict[str, object]:
        return {"backward passes of the model": self.passes}

    def _kind_of_pass(self) -> PassKind:
        if self.paused or self._worker is None:
            return PassKind.PAUSED
        # Under join() a rank without data calls its hook outside of any backward pass: it takes part in the
        # communication but does not step, as in the ordinary loop.
        return PassKind.STEPS if inside_backward() else PassKind.JOINED

    def _begin_to_step(self, worker: OrderedWorker, current: BackwardPass) -> None:
        self._follow_graph_task(worker, current)  # from here on, others ask whether the pass runs
        self.state.begin()
        self._stepper.begin()
        averaged = self._known_buckets.parameters
        if averaged:  # else this is the first pass, whose last bucket shows
            self._stepper.require_averaged(averaged)
        if self._release is not None:
            self._release.require_possible(averaged)
            current.released = ReleasedPass(self._release)
        if self._check:
            current.watch = WeightWatch()

    def _take(self, current: BackwardPass, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if current.kind is PassKind.REFUSED and current.failure is not None:
            return failed_future(same_error(current.failure), bucket.buffer())
        if current.kind is PassKind.PAUSED:
            self.gradients.take_as_new(bucket.parameters())
        worker, last = self._worker, bucket.is_last()
        if worker is None:
            return self._comm_hook(self._comm_state, bucket).then(partial(average_of, bucket.buffer()))
        done = self._step(worker, current, bucket, last=last)
        if last:
            current.stage = PassStage.COMPLETE
            self.gradients.forget_arrivals()
            if self._ddp_drops_buffers():
                self._known_buckets.forget()
            failed = self.state.phase is Phase.FAILED
            self._peers.meet(self.passes, current, bucket.buffer().device, failed=failed)
        return done

    def _step(
        self, worker: OrderedWorker, current: BackwardPass, bucket: GradBucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future that completes when a bucket is averaged and, if the pass steps, stepped."""
        if current.kind is PassKind.STEPS:
            self._follow_graph_task(worker, current)
        current.buckets += 1
        gradients = self._known_buckets.gradients(bucket)
        if last:
            self._stepper.require_averaged(self._known_buckets.parameters)
        used: list[bool] = []
        if self._shares_used or current.released is not None:
            used = [self.gradients.has_come(parameter) for parameter in gradients.parameters]
        taken = Bucket(bucket.index(), gradients, self._start_average(bucket))
        if self._shares_used:
            taken.share_used(used, worker.process_group)
        if current.failure is not None:
            # But it is averaged: another rank may not know of the failure yet, and all must call the hook.
            return failed_future(same_error(current.failure), bucket.buffer())
        if current.released is None:
            return current.take(worker, taken, last=last)
        current.released.begin(gradients, used, last=last)
        done = current.take(worker, taken, last=last)
        if not current.released.limit_backward(done, gradients.buffer.device):
            current.fail(  # and goes on: the hook may wait for later buckets
                ConfigError(
                    "a bucket was not averaged in time: if the communication hook waits for later buckets, "
                    "leave release_gradients out"
                )
            )
        return done

    def _start_average(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the communication hook.

        Raises:
            CommunicationError: It has failed. The pass steps no further.
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

    def _ddp_drops_buffers(self) -> bool:
        """Return whether DDP makes new buffers for its next pass.

        It rebuilds its buckets after the first one, and with ``lazy_bucket_allocation`` (torch 2.15) it has
        buffers only during a backward pass.
        """
        return self.passes == 1 or getattr(self._model(), "lazy_bucket_allocation", False)

    def _ddp_sends_last(self) -> bool:
        """Return whether DDP may send its record of used parameters after the last hook.

        A peer may still wait for a bucket: Gloo aborts a process that receives a message of another size.
        """
        model = self._model()
        return model is None or (model.find_unused_parameters and not model.static_graph)

    # ---- the end of a pass ----

    def _follow_graph_task(self, worker: OrderedWorker, current: BackwardPass) -> None:
        """Finish the pass at the end of the graph task that hands over its last bucket.

        Every backward pass is one task of torch's engine, and a pass inside it, such as a checkpoint's, is
        one of its own. At its end DDP waits for all buckets, and copies averages into ``.grad``; then the
        pass is finished. If a task fails, torch drops its callbacks, and with them the mark that they hold.
        """
        task = graph_task_id()
        if task in current.tasks:
            return
        mark = _TaskMark()
        current.tasks[task] = weakref.ref(mark)
        dropped = weakref.finalize(mark, self._abandon, current)
        dropped.atexit = False

        def finish(mark: _TaskMark) -> None:
            del mark
            dropped.detach()
            if current.stage is PassStage.COMPLETE:
                self._finish(current)

        if self._model() is None:
            at_end_of_backward(partial(current.announce_rest, worker))
        # After what communication hooks do at the end: states with error feedback look at ``.grad`` to see
        # which parameters no rank has used.
        after_backward(partial(after_backward, partial(finish, mark)))

    def _finish(self, current: BackwardPass) -> None:
        current.wait()  # DDP has, except with require_manual_backward_finalization (torch 2.15)
        current.end()
        if current.failure is not None:
            self.state.raise_error()
        self._stepper.finish(self.gradients)
        self.state.finish()

    def _abandon(self, current: BackwardPass) -> None:
        """End a pass that was left before it was finished: nothing more of it is stepped."""
        if current.stage is PassStage.ENDED or current is not self._current:
            return
        current.fail(
            StepError(
                f"the backward pass ended after {current.buckets} buckets, with an error or because "
                "parameters got no gradient, which DDP allows with find_unused_parameters=True only, without "
                "skip_all_reduce_unused_params"
            )
        )
        current.end()

    # ---- between passes ----

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has got here; return the last report, or raise the first error."""
        self.require_outside_pass()
        if self.state.phase is not Phase.REMOVED:
            try:
                self._peers.wait(timeout)
            except OverlapError as error:
                raise self.state.fail(error) from error.__cause__
        self.state.raise_error()
        return self.state.report

    def require_outside_pass(self) -> None:
        """Raise the first error, or raise if a backward pass runs or was left.

        Raises:
            ConfigError: A backward pass runs, around this call or in another thread; it goes on.
            StepError: One has begun to hand over buckets, and has ended without an error and without
                handing over all.
        """
        left = self.refuse_inside_pass("step() or wait()")
        if left is not None:
            left.wait()  # steps in progress end first, or the report would miss them
            self._abandon(left)
        self.state.raise_error()

    def refuse_inside_pass(self, call: str) -> BackwardPass | None:
        """Raise if a backward pass that steps is running, in this thread or another one.

        Returns:
            A pass that was left before it had finished; ``None`` if there is none.

        Raises:
            ConfigError: One is running.
        """
        current = self._current  # read once: another thread may begin the next one
        if self.state.phase is not Phase.RUNNING or current.stage is PassStage.ENDED:
            return None
        if current.runs() or inside_backward():
            raise ConfigError(
                f"{call} while backward() runs, in one of its hooks or in another thread: call it when "
                "backward() has returned"
            )
        return current

    def remove(self) -> None:
        """Stop stepping; only average from now on, if the model still exists."""
        failed = self.state.phase is Phase.FAILED
        self._failed |= failed  # if called twice, too
        self._stepper.remove(self.gradients, failed=failed)
        self.state.remove()
        if self._worker is not None:
            self._worker.close()
        self._worker = None
        self._current.end()
        if self._release is not None:  # now that no job frees memory any more
            self._release.memory.restore()
        self._known_buckets.forget()
        if failed and self._model() is not None:  # else its parameters may be another model's now
            self._known_buckets.drop_gradients()
            self._current.await_averages()
        self._current = BackwardPass(PassKind.PAUSED, self.state, self._stepper)

    def _terms(self) -> dict[str, object]:
        hook = self._comm_hook
        return {
            "communication hook": getattr(hook, "__qualname__", type(hook).__qualname__),
            "parameters may be unused": self._shares_used,
            **self._progress(),
            **self._stepper.terms(),
        }


def _as_overlap_error(error: Exception) -> OverlapError:
    """Return an error, or one of this package that has it as its cause."""
    if isinstance(error, OverlapError):
        return error
    wrapped = StepError(f"the step failed before it had begun: {error_text(error)}")
    wrapped.__cause__ = error
    return wrapped


def _require_agreement(compare: Callable[[], object]) -> None:
    try:
        compare()
    except (AgreementError, dist.DistError) as error:
        raise kind_of_failure(error)(error_text(error)) from error


class _TaskMark:
    """Is alive as long as the callbacks of a graph task."""
