"""The backward passes of a state that chooses: which candidate has which, during a trial and behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ddp_compress_hooks import CompressState
from ddp_quant_hooks.auto_choice import Assignment, Choice
from ddp_quant_hooks.auto_times import Mark
from ddp_quant_hooks.auto_trial import Trial, TrialPass
from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.resume import Bucket, HeldPass, Resumption
from dist_utils import torch_compat

__all__ = ["AutoPasses", "BucketLayout", "RunningPass", "bucket_bytes", "close_states"]

BucketLayout = list[tuple[int, list["weakref.ref[torch.Tensor]"]]]
"""The buckets of a pass in their order: bytes and parameters of each."""

_PASSES_UNTIL_IDLE = 2
"""So many passes after the choice every rank has ended its last exchange with any other candidate."""


def bucket_bytes(buffer: torch.Tensor) -> int:
    """Return the size of a bucket; of a sparse one, as if it were dense."""
    return buffer.numel() * buffer.element_size()


class RunningPass:
    """A backward pass that is running.

    Attributes:
        seen: What tells which buckets belong to it, and whether it ended well.
        trial: What is measured in it, during a trial.
        held: Where its buckets wait, if it is averaged in those of a saved run.
        failure: Why none of its buckets is averaged.
        layout: The buckets that have come.
    """

    def __init__(self) -> None:
        self.seen = BackwardPass()
        self.trial: TrialPass | None = None
        self.held: HeldPass | None = None
        self.failure: RuntimeError | None = None
        self.layout: BucketLayout = []


class AutoPasses:
    """Counts backward passes, and says which candidate averages the buckets of each.

    Args:
        candidates: By name.
        make_trial: Makes a trial, given what averages until its first turn.
        chosen: Told of a choice.
        idle: Told when candidates that were not chosen are idle on all ranks.
        look_again_every: After so many passes with a choice there is another trial; 0: never.
    """

    def __init__(
        self,
        candidates: Mapping[str, Candidate],
        make_trial: Callable[[Assignment], Trial],
        chosen: Callable[[Choice], None],
        idle: Callable[[], None],
        look_again_every: int,
    ) -> None:
        self._candidates = candidates
        self._make_trial, self._chosen, self._idle = make_trial, chosen, idle
        self._look_again_every = look_again_every
        self.assignment = Assignment(next(iter(candidates)))
        self.since_choice = 0
        self._trial: Generator[TrialPass, None, Choice] | None = None
        self._running: RunningPass | None = None
        self._layout: BucketLayout = []
        self._resumption: Resumption | None = None
        self._failure: RuntimeError | None = None
        self.begin_trial()

    @property
    def trying(self) -> bool:
        """Whether there is a trial."""
        return self._trial is not None

    @property
    def layout(self) -> BucketLayout:
        """The buckets of the last pass that has ended well."""
        running = self._running
        if running is not None and running.held is None and running.seen.complete:
            return running.layout
        return self._layout

    @property
    def sizes(self) -> list[int]:
        """The bytes of those of the last one before the running pass."""
        return [size for size, _ in self._layout]

    def begin_trial(self) -> None:
        """Try the candidates, from the next pass on."""
        self._trial = self._make_trial(self.assignment).run()

    def go_on_with(self, choice: Choice, since_choice: int, layout: BucketLayout) -> None:
        """Go on from another run's choice, in its buckets."""
        self._trial, self._running, self._failure = None, None, None
        self.assignment, self.since_choice, self._layout = choice.assignment, since_choice, layout
        parameters = [[one() for one in bucket] for _, bucket in layout]
        self._resumption = Resumption(parameters) if layout else None  # type: ignore[arg-type] # they live

    def start_over(self) -> None:
        """Forget an error, and a trial that was not over: it begins anew."""
        self._failure, self._running = None, None
        if self.trying:
            self.begin_trial()
        self.since_choice = 0

    def begin_bucket(
        self, bucket: Bucket, average: Callable[[RunningPass, Bucket], torch.futures.Future[Any]]
    ) -> RunningPass:
        """Return the pass that a bucket belongs to; the first bucket of a pass begins it.

        Args:
            bucket: The bucket.
            average: Averages a bucket of the pass.

        Raises:
            RuntimeError: The ranks have not agreed, now or before; for every bucket until :meth:`start_over`.
        """
        task, running = torch_compat.graph_task_id(), self._running
        if running is None or not running.seen.includes(task, bucket.index()):
            running = self._begin_pass(bucket)
            if self._resumption is not None and running.failure is None:
                running.held = self._resumption.next_pass(bucket, partial(average, running))
        running.seen.add_bucket(task, bucket.index())
        parameters = [weakref.ref(parameter) for parameter in bucket.parameters()]
        running.layout.append((bucket_bytes(bucket.buffer()), parameters))
        if running.failure is not None:
            raise running.failure
        return running

    def _begin_pass(self, bucket: Bucket) -> RunningPass:
        ended, self._running = self._running, RunningPass()
        if ended is not None:
            self._finish(ended)
        began = Mark(bucket.buffer().device) if self.trying else None
        if ended is not None and ended.trial is not None:
            ended.trial.times.ended = began
        try:
            if self._failure is not None:
                raise self._failure
            self._advance(self._running)
        except RuntimeError as error:
            self._failure = self._running.failure = error.with_traceback(None)
        if self._running.trial is not None:
            self._running.trial.times.began = began
        return self._running

    def _finish(self, ended: RunningPass) -> None:
        if ended.seen.complete:
            if ended.held is None:
                self._layout = ended.layout
            elif self._resumption is not None:
                self._resumption.ended(ended.held)
        if self._resumption is not None and self._resumption.over:
            self._resumption = None
        ended.held = None  # which refers to the pass

    def _advance(self, running: RunningPass) -> None:
        if self._trial is None:
            self.since_choice += 1
            if self.since_choice == _PASSES_UNTIL_IDLE and not self._look_again_every:
                self._idle()
            if self._look_again_every and self.since_choice >= self._look_again_every:
                self.begin_trial()
        if self._trial is not None:
            try:
                running.trial = next(self._trial)
            except StopIteration as over:
                choice: Choice = over.value
                self._trial, self.since_choice = None, 0
                self._use(choice.assignment, anew=True)
                self._chosen(choice)
            else:
                self._use(running.trial.assignment)

    def _use(self, assignment: Assignment, *, anew: bool = False) -> None:
        """Let other candidates average. Residuals of those whose buckets change, or of all, are dropped.

        When a candidate comes again, what it lost in its last pass is of a gradient of long ago.
        """
        before, self.assignment = self.assignment, assignment
        for name in before.names | assignment.names:
            state = self._candidates[name].state
            same = name in before.names & assignment.names and before.part(name) == assignment.part(name)
            if isinstance(state, ResidualCheckpoints) and (anew or not same):
                state.wait_for_jobs()
                state.feedback.forget()


def close_states(candidates: Sequence[Candidate], *, but: Sequence[Candidate] = ()) -> None:
    """End the threads and private groups of this project's states."""
    kept = {id(candidate.state) for candidate in but}
    for candidate in candidates:
        state = candidate.state
        if isinstance(state, (ResidualCheckpoints, CompressState)) and id(state) not in kept:
            state.close()
