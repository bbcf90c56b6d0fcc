"""The backward passes of a state that chooses: which candidate averages which, in a trial and after it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch

from ddp_compress_hooks import CompressState
from ddp_quant_hooks.auto_choice import Assignment, Choice
from ddp_quant_hooks.auto_options import AutoOptions
from ddp_quant_hooks.auto_ranks import AutoRanks
from ddp_quant_hooks.auto_times import Mark
from ddp_quant_hooks.auto_trial import Trial, TrialPass
from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.resume import Bucket, HeldPass, Resumption
from dist_utils import torch_compat
from dist_utils.torch_compat import GradBucket

__all__ = ["AutoPasses", "BucketLayout", "CandidateError", "RunningPass", "close_states"]

_log = logging.getLogger(__name__)

BucketLayout = list[tuple[int, list["weakref.ref[torch.Tensor]"]]]
"""The buckets of a pass in their order: bytes and parameters of each."""

_PASSES_UNTIL_IDLE = 2
"""This many passes after the choice, every rank has ended its last exchange with other candidates."""


def bucket_bytes(buffer: torch.Tensor) -> int:
    """Return the size of a bucket; 0 for a sparse one, which is averaged without compression."""
    return 0 if buffer.is_sparse else buffer.numel() * buffer.element_size()


class RunningPass:
    """A backward pass that is running.

    Attributes:
        seen: Knows which buckets belong to it, and whether it ended well.
        trial: What is measured in it, during a trial.
        held: Holds its buckets, if it is averaged in those of a saved run.
        failure: Why none of its buckets is averaged.
        layout: The buckets so far.
    """

    def __init__(self) -> None:
        self.seen = BackwardPass()
        self.trial: TrialPass | None = None
        self.held: HeldPass | None = None
        self.failure: RuntimeError | None = None
        self.layout: BucketLayout = []


class CandidateError(RuntimeError):
    """A candidate has raised during the trial; its error is the cause."""


class AutoPasses:
    """Counts backward passes, and averages the buckets of each with the candidate whose turn it is.

    Holds no reference to the state, so that the state is freed as soon as its owner drops it.

    Args:
        candidates: By name.
        ranks: The communication between the ranks.
        options: The options of the state.

    Attributes:
        choice: The latest choice.
        assignment: The current candidate for each bucket.
        since_choice: The number of passes since the choice.
        began: Whether a pass has begun since the last load.
    """

    def __init__(self, candidates: Mapping[str, Candidate], ranks: AutoRanks, options: AutoOptions) -> None:
        self._candidates, self._ranks, self._options = candidates, ranks, options
        self.choice: Choice | None = None
        self.assignment = Assignment(next(iter(candidates)))
        self.since_choice = 0
        self.began = False
        self._trial: Generator[TrialPass, Sequence[int], Choice] | None = None
        self._trial_began = False
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
        """The buckets of the last pass that ended well."""
        running = self._running
        if running is not None and running.held is None and running.seen.complete:
            return running.layout
        return self._layout

    @property
    def used(self) -> list[tuple[str, Candidate]]:
        """The candidates that average now, in the order of their names."""
        return [(name, self._candidates[name]) for name in sorted(self.assignment.names)]

    def begin_trial(self) -> None:
        """Try the candidates, from the next pass on."""
        options = self._options
        trial = Trial(
            list(self._candidates), self.assignment, options.max_error, options.most_passes, self._ranks
        )
        self._trial, self._trial_began = trial.run(), False

    def try_again(self) -> None:
        """Forget the choice."""
        self.choice = None
        self._resumption = None
        self.begin_trial()
        self.start_over()

    def go_on_with(self, choice: Choice, since_choice: int, layout: BucketLayout) -> None:
        """Continue from another run's choice, in its buckets."""
        self._trial, self._running, self._failure = None, None, None
        self.began = False
        self.choice = choice
        self.assignment, self.since_choice, self._layout = choice.assignment, since_choice, layout
        parameters = [[one() for one in bucket] for _, bucket in layout]
        self._resumption = Resumption(parameters) if layout else None  # type: ignore[arg-type] # they live

    def start_over(self) -> None:
        """Forget an error, and restart an unfinished trial."""
        self._failure, self._running = None, None
        if self.trying:
            # An error may have occurred when ranks were at different turns.
            first = Assignment(next(iter(self._candidates)))
            self.assignment = first if self.choice is None else self.choice.assignment
            self.begin_trial()
        self.since_choice = 0

    def begin_bucket(self, bucket: Bucket) -> RunningPass:
        """Return the pass that a bucket belongs to; the first bucket of a pass begins it.

        Raises:
            RuntimeError: The ranks have not agreed, now or before. Raised for every bucket until
                :meth:`start_over`.
        """
        task, running = torch_compat.graph_task_id(), self._running
        if running is None or not running.seen.includes(task, bucket.index()):
            running = self._begin_pass(bucket)
            if self._resumption is not None and running.failure is None:
                running.held = self._resumption.next_pass(bucket, partial(self.average, running))
        running.seen.add_bucket(task, bucket.index())
        parameters = [weakref.ref(parameter) for parameter in bucket.parameters()]
        running.layout.append((bucket_bytes(bucket.buffer()), parameters))
        if running.failure is not None:
            raise running.failure
        return running

    def average(self, running: RunningPass, bucket: Bucket) -> torch.futures.Future[Any]:
        """Average a bucket with the candidate whose turn it is.

        Raises:
            CandidateError: The candidate raises, during a trial.
        """
        buffer, trial = bucket.buffer(), running.trial
        size = bucket_bytes(buffer)
        name = self.assignment.of(size)
        if trial is None:
            state, hook = self._candidates[name]
            return hook(state, cast("GradBucket", bucket))
        call = partial(_try, name, self._candidates[name], bucket)
        if trial.sampled == len(running.layout) - 1 and size:
            return trial.error.average(self._ranks.worker, buffer, call)
        if not trial.timed:
            return call()
        handed_over = Mark(buffer.device)
        return trial.times.watch(size, handed_over, buffer.device, call())

    def _begin_pass(self, bucket: Bucket) -> RunningPass:
        self.began = True
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
        ended.held = None  # it refers to the pass

    def _advance(self, running: RunningPass) -> None:
        every = self._options.look_again_every
        if self._trial is None:
            self.since_choice += 1
            if self.since_choice == _PASSES_UNTIL_IDLE and not every:
                self._free()
            if every and self.since_choice >= every:
                self.begin_trial()
        if self._trial is not None:
            sizes = [size for size, _ in self._layout]
            try:
                running.trial = self._trial.send(sizes) if self._trial_began else next(self._trial)
            except StopIteration as over:
                self._choose(over.value)
            else:
                self._trial_began = True
                # A sample measures the error of one pass, without residuals of earlier ones.
                self._use(running.trial.assignment, anew=running.trial.sampled is not None)

    def _choose(self, choice: Choice) -> None:
        self._trial, self.since_choice = None, 0
        self._use(choice.assignment, anew=True)
        self.choice = choice
        if self._ranks.process_group.rank() == 0:
            _log.info("AutoState: %s", choice.why)

    def _free(self) -> None:
        """Close what only the trial needed."""
        used = [candidate for _, candidate in self.used]
        close_states(list(self._candidates.values()), but=used)
        self._ranks.rest()

    def _use(self, assignment: Assignment, *, anew: bool = False) -> None:
        """Switch candidates, and drop the residuals of those whose buckets change, or of all.

        By a candidate's next turn, its residuals belong to a gradient from long ago.
        """
        before, self.assignment = self.assignment, assignment
        for name in before.names | assignment.names:
            state = self._candidates[name].state
            same = name in before.names & assignment.names and before.part(name) == assignment.part(name)
            if isinstance(state, ResidualCheckpoints) and (anew or not same):
                state.wait_for_jobs()
                state.feedback.forget()


def _try(name: str, candidate: Candidate, bucket: Bucket) -> torch.futures.Future[Any]:
    try:
        averaged = candidate.hook(candidate.state, cast("GradBucket", bucket))
    except Exception as error:
        raise CandidateError(f"candidate {name!r} of AutoState: {error}") from error
    if not hasattr(averaged, "then"):  # futures of C++ are of another class than torch.futures.Future
        raise CandidateError(f"candidate {name!r} returned a {type(averaged).__name__}, no future")
    return averaged


def close_states(candidates: Sequence[Candidate], *, but: Sequence[Candidate] = ()) -> None:
    """End the threads and private groups of this project's states."""
    kept = {id(candidate.state) for candidate in but}
    for candidate in candidates:
        state = candidate.state
        if isinstance(state, (ResidualCheckpoints, CompressState)) and id(state) not in kept:
            state.close()
