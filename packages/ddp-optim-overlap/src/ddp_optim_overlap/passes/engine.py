"""The engine of an overlap, the only owner of a backward pass: it has its buckets averaged and stepped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import (
    CommunicationError,
    ConfigError,
    OverlapError,
    StepError,
    not_averaged,
    text_of,
)
from ddp_optim_overlap.loop.gradient_watch import GradientWatch
from ddp_optim_overlap.model import may_leave_out, require_ddp_options
from ddp_optim_overlap.passes.backward_pass import BackwardPass, PassKind, PassStage
from ddp_optim_overlap.passes.bucket import Bucket, KnownBuckets, average_of
from ddp_optim_overlap.passes.peers import Peers
from ddp_optim_overlap.passes.queue import BucketQueue
from ddp_optim_overlap.passes.stepping import Stepper, step_buckets
from ddp_optim_overlap.passes.weight_reuse import WeightWatch
from ddp_optim_overlap.phase import OverlapState, Phase
from ddp_optim_overlap.released_gradients import GradientRelease, ReleasedPass
from ddp_optim_overlap.report import StepReport
from dist_utils import AgreementError, OrderedWorker, require_same_terms
from dist_utils.comm_hooks import CommHook, failed_future, is_pair
from dist_utils.process_groups import same_error
from dist_utils.torch_compat import (
    GradBucket,
    before_end_of_backward,
    graph_task_id,
    in_final_callback,
    inside_backward,
    inside_nested_backward,
)

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
        model: The model, which is not kept alive; ``None`` if it is unknown.
        skips_unused: Whether a parameter that no rank has used is left alone. Where some may be unused, the
            ranks then tell each other which parameters got a gradient.
        check: Watch for stepped weights that the same backward pass reads.
        release: Frees the gradients of every bucket after its step.
        passes: How many backward passes earlier engines of the model have begun or refused.

    Attributes:
        state: What the overlap is doing.
        gradients: Which gradients have come.
        known_buckets: The views of buckets seen before.
        release: As given.
        paused: Whether passes only average.
        passes: How many backward passes were begun or refused, earlier engines' among them.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        parameters: Sequence[torch.Tensor],
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
        self.gradients = GradientWatch(parameters)
        self.release = release
        if release is not None and not release.memory.stays_readable:
            self.gradients.tell(release.memory.restore)
        self.known_buckets = KnownBuckets(parameters)
        self.paused = False
        self._stepper = stepper
        self._comm_hook, self._comm_state = comm_hook, comm_state
        self._model = (lambda: None) if model is None else weakref.ref(model)
        self._skips_unused = skips_unused
        self._static_graph: bool | None = None  # as last checked
        # DDP looks for buffers once, too; finding none is a walk through the whole model.
        self._has_buffers = model is not None and next(model.module.buffers(), None) is not None
        self._watch = WeightWatch() if check else None
        worker = OrderedWorker(process_group, name=_NAME, terms=self._terms)
        self._worker: OrderedWorker | None = worker
        self._peers: Peers | None = Peers(worker, _NAME)
        self.state = OverlapState(worker)
        # A watch must find whatever may happen in any run, and memory is freed as early as possible.
        gathers = self._watch is None and release is None
        self._queue = BucketQueue(partial(step_buckets, stepper), self.state, _NAME, gathers=gathers)
        self._current = BackwardPass(PassKind.REMOVED)
        self._told = False
        self._averaged: set[torch.Tensor] = set()
        self._process_group, self._failed = process_group, False
        self.passes, self._steps = passes, 0

    @property
    def releases(self) -> bool:
        """Whether gradients are freed when they are stepped with."""
        return self.release is not None

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
            return self._take(self._current, bucket)
        except OverlapError as error:
            self._current.cancel()
            failure = self._current.failure = self.fail(error)
            self._current.refused = True
            self._queue.give_up(failure)
            if self._ddp_sends_last():  # to peers that may wait for this bucket
                raise
            # Raised here, it would leave DDP in the middle of a pass, and the model unusable.
            return failed_future(same_error(failure), bucket.buffer())

    def _begin(self) -> None:
        """Begin a backward pass; raises before any communication if it cannot be averaged and stepped."""
        self.passes += 1
        if self.state.phase is Phase.RUNNING:
            self._abandon(self._current)
        current = self._current = BackwardPass(self._kind_of_pass())
        self._queue.end()
        worker, peers, model = self._worker, self._peers, self._model()
        if worker is None or peers is None:
            self._compare_after_error()
            return
        peers.wait()
        self.state.raise_error()
        if model is not None:
            if model.static_graph is not self._static_graph:  # the graph may be made static later
                require_ddp_options(model)
                self._static_graph = model.static_graph
            self._told = self._skips_unused and may_leave_out(model)
        try:
            worker.agree()
        except (AgreementError, dist.DistError) as error:
            raise ConfigError(text_of(error)) from error
        if current.kind is PassKind.STEPS:
            self._begin_to_step(current)
        # A pass without a last bucket announces the rest before DDP waits for it. A nested pass, or one in a
        # final callback, may end differently, so no bucket waits there.
        waits = inside_backward() and not in_final_callback() and not inside_nested_backward()
        self._queue.begin(waits=waits and current.kind is PassKind.STEPS)

    def _compare_after_error(self) -> None:
        """Raise if ranks that have removed a failed overlap go on with different iterations."""
        if self._failed:
            self._failed = False
            try:
                require_same_terms(
                    self._process_group, f"{_NAME} was removed after an error", self._progress()
                )
            except (AgreementError, dist.DistError) as error:
                raise ConfigError(text_of(error)) from error

    def _progress(self) -> dict[str, object]:
        return {"backward passes of the model": self.passes}

    def _kind_of_pass(self) -> PassKind:
        if self._worker is None:
            return PassKind.REMOVED
        if self.paused:
            return PassKind.PAUSED
        # Under join() a rank without data calls its hook outside of any backward pass: it takes part in the
        # communication but does not step, as in the ordinary loop.
        return PassKind.STEPS if inside_backward() else PassKind.JOINED

    def _begin_to_step(self, current: BackwardPass) -> None:
        self._follow_graph_task(current)  # from here on, others ask whether the pass runs
        self._steps += 1
        current.number = self._steps
        self.state.begin(current.report)
        self._stepper.begin()
        if self._averaged:  # else this is the first pass, whose last bucket tells
            self._stepper.require_averaged(self._averaged)
        if self.release is not None:
            self.release.require_possible(self._averaged)
            current.released = ReleasedPass(self.release)
        if self._watch is not None:
            self._watch.begin()
            current.watch = self._watch

    def _take(self, current: BackwardPass, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if current.failure is not None and current.refused:
            return failed_future(same_error(current.failure), bucket.buffer())
        worker, last = self._worker, bucket.is_last()
        done = (
            self._only_average(bucket) if worker is None else self._step(worker, current, bucket, last=last)
        )
        if last:
            current.stage = PassStage.COMPLETE
            self.gradients.forget_arrivals()
            if self._peers is not None and current.failure is None:
                failed = self.state.phase is Phase.FAILED
                self._peers.meet(self.passes, current, bucket.buffer().device, failed=failed)
        return done

    def _step(
        self, worker: OrderedWorker, current: BackwardPass, bucket: GradBucket, *, last: bool
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future that completes when a bucket is averaged and, if the pass steps, stepped."""
        if current.kind is PassKind.STEPS:
            self._follow_graph_task(current)
        elif current.kind is PassKind.PAUSED:
            self.gradients.take_as_new(bucket.parameters())
        current.buckets += 1
        gradients = self.known_buckets.gradients(bucket)
        if not self._averaged.issuperset(gradients.parameters):
            self._averaged.update(gradients.parameters)
        if last:
            self._stepper.require_averaged(self._averaged)
        used = self._used(gradients.parameters)
        averaged = self._start_average(current, bucket)
        if (failure := self._known_failure(current, bucket, averaged)) is not None:
            return failed_future(same_error(failure), bucket.buffer())
        if current.released is not None and used is not None:
            current.released.hand_over(gradients, used, last=last)
        taken = Bucket(bucket.index(), gradients, averaged)
        if self._told and used is not None:
            taken.tell_used(used, worker.process_group)
        done = self._queue.take(worker, current, taken, last=last)
        if current.released is not None:
            current.released.limit_backward(done, gradients.buffer.device)
        return done

    def _only_average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.gradients.take_as_new(bucket.parameters())
        return self._comm_hook(self._comm_state, bucket).then(partial(average_of, bucket.buffer()))

    def _used(self, parameters: Sequence[torch.Tensor]) -> list[bool] | None:
        """Return which parameters got a gradient on this rank; ``None`` if it does not matter."""
        if not self._told and self.release is None:
            return None
        if self._told and not self.gradients.watches(parameters):
            raise ConfigError(
                "DDP averages a parameter that the model did not have when overlap_optimizer was called: "
                "remove() the overlap and make a new one"
            )
        return [self.gradients.has_come(parameter) for parameter in parameters]

    def _start_average(self, current: BackwardPass, bucket: GradBucket) -> torch.futures.Future[Any]:
        """Call the communication hook.

        Raises:
            CommunicationError: It has failed, or has not returned a future. The pass steps no further.
        """
        try:
            averaged = self._comm_hook(self._comm_state, bucket)
            if not callable(getattr(averaged, "then", None)):
                raise TypeError(f"it must return a future, got {type(averaged).__name__}")  # noqa: TRY301
        except Exception as error:
            current.cancel()
            text = f"the communication hook failed for bucket {bucket.index()}: {text_of(error)}"
            raise CommunicationError(text, current.report()) from error
        return averaged

    def _known_failure(
        self, current: BackwardPass, bucket: GradBucket, averaged: torch.futures.Future[Any]
    ) -> OverlapError | None:
        """Return why nothing more of the pass is stepped, if the hook knows at once that it has failed.

        A rank that did not come is not waited for again. But later buckets are averaged: on another rank the
        same failure may be known a moment later, and all ranks must call the hook for as many buckets.
        """
        if current.failure is None and averaged.done():
            try:
                averaged.value()
            except Exception as error:  # noqa: BLE001 - whatever the hook has raised
                current.cancel()
                current.failure = self.fail(not_averaged(bucket.index(), error, current.report()))
                self._queue.give_up(current.failure)
        return current.failure

    def _ddp_sends_last(self) -> bool:
        """Return whether DDP may send its record of used parameters after the last hook.

        A peer may still wait for a bucket: Gloo aborts a process that receives a message of another size.
        """
        model = self._model()
        return model is None or (model.find_unused_parameters and not model.static_graph)

    def before_forward(self) -> None:
        """Raise the error of a peer before DDP's forward pass communicates.

        In its second pass DDP rebuilds its buckets, and it broadcasts buffers. Where it does neither, the
        last meeting is waited for in the next backward pass.
        """
        if self._peers is None or self.state.phase is Phase.RUNNING:
            return
        try:
            if self.passes == 1 or self._has_buffers:
                self._peers.wait()
            self.state.raise_error()
        except OverlapError as error:
            self.passes += torch.is_grad_enabled()  # its backward pass would have been refused
            raise self.fail(error) from error.__cause__

    # ---- the end of a pass ----

    def _follow_graph_task(self, current: BackwardPass) -> None:
        """Register what happens at the end of the graph task that hands over a bucket.

        Every backward pass is one task of torch's engine, and a pass inside it, such as a checkpoint's, is
        one of its own. In this order:

        1. All nodes have run. Announce buckets that wait for others, before DDP waits for every bucket.
        2. DDP waits, and copies averages into ``.grad``; it registers this with its last bucket.
        3. If the last bucket has come: the pass is finished.

        If a task fails, torch drops its callbacks, and with them the mark that they hold.
        """
        task = graph_task_id()
        if task in current.tasks:
            return
        mark = _TaskMark()
        current.tasks[task] = weakref.ref(mark)
        dropped = weakref.finalize(mark, self._abandon, current)
        dropped.atexit = False

        def finish() -> None:
            dropped.detach()
            if current.stage is PassStage.COMPLETE:
                self._finish(current)

        def announce(mark: _TaskMark = mark) -> None:
            if self._worker is not None:
                self._queue.announce(self._worker, current)
            before_end_of_backward(partial(_with_mark, finish, mark))

        before_end_of_backward(announce)

    def _finish(self, current: BackwardPass) -> None:
        current.end()
        if current.canceled:
            self.state.raise_error()
        self._queue.end()
        current.norm = self._stepper.norm
        self._stepper.finish(self.gradients)
        self.state.finish()

    def _abandon(self, current: BackwardPass) -> None:
        """End a pass that was left before it was finished: nothing more of it is stepped."""
        if current.stage is PassStage.ENDED or current is not self._current:
            return
        current.cancel()
        self.fail(
            StepError(
                f"the backward pass ended after {current.buckets} buckets, with an error or because "
                "parameters got no gradient, which DDP allows with find_unused_parameters=True only",
                current.report(),
            )
        )
        current.end()

    # ---- between passes ----

    def wait(self, timeout: float | None = None) -> StepReport:
        """Wait until every rank has got here; return the last report, or raise the first error."""
        self.require_outside_pass()
        if self._peers is not None:
            try:
                self._peers.wait(timeout)
            except OverlapError as error:
                raise self.fail(error) from error.__cause__
        self.state.raise_error()
        return self.state.report()

    def require_outside_pass(self) -> None:
        """Raise the first error, or raise if a backward pass runs or was left.

        Raises:
            ConfigError: A backward pass runs, around this call or in another thread; it goes on.
            StepError: One has begun to hand over buckets, and has ended without an error and without
                handing over all.
        """
        left = self.refuse_inside_pass("step() or wait()")
        if left is not None:
            self._queue.wait()  # steps in progress end first, or the report would miss them
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

    def fail(self, error: OverlapError) -> OverlapError:
        """Keep an error as the first one, and tell the other ranks; return what is to be raised.

        The peers hear of it without a wait for any of them: the worker's private group ends.
        """
        first = self.state.fail(error, error.__cause__)
        if self._worker is not None:
            self._worker.fail(first)
        return first

    def remove(self, *, watching: bool) -> None:
        """Stop stepping; only average from now on.

        Args:
            watching: Whether gradients that come still matter, because ``step()`` is still to come.
        """
        if not watching:
            self.gradients.stop()
        if self._watch is not None:
            self._watch.end()
        self.gradients.forget_used()
        self._failed = self.state.phase is Phase.FAILED
        self.state.remove()
        worker, self._worker, self._peers = self._worker, None, None
        if worker is not None:
            worker.close()
        if self.release is not None:  # now that no job frees memory any more
            self.release.memory.restore()
        self.known_buckets.forget()
        if self._failed:
            self._queue.await_averages()
        self._queue.end()
        self._current = BackwardPass(PassKind.REMOVED)

    def _terms(self) -> dict[str, object]:
        hook = self._comm_hook
        return {
            "communication hook": getattr(hook, "__qualname__", type(hook).__qualname__),
            "unused parameters are told": self._told,
            **self._progress(),
            **self._stepper.terms(),
        }


class _TaskMark:
    """Is alive as long as the callbacks of a graph task."""


def _with_mark(callback: Callable[[], None], mark: _TaskMark) -> None:
    del mark
    callback()
