"""Error feedback from pass to pass: the rounding errors of a step that counts are added to the next one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.residuals import Residual, Residuals
from ddp_quant_hooks.resume import Bucket, Resumption
from ddp_quant_hooks.saved import SavedResiduals
from ddp_quant_hooks.tensor_steps import TensorStep
from dist_utils import torch_compat

__all__ = ["Feedback"]


class Feedback:
    """The residuals, and the backward pass that is adding to them.

    A pass is finished when the next one begins: it counts if it ended well, all its means were finite, and
    the user has not discarded it.

    Args:
        residuals: The residuals of the state.
    """

    def __init__(self, residuals: Residuals) -> None:
        self.residuals = residuals
        self.loaded: SavedResiduals | None = None
        self._pass: BackwardPass | None = None
        self._explicit: TensorStep | None = None
        self._resumption: Resumption | None = None
        self._steps = 0
        self._kind: type[BackwardPass] | None = None

    def begin_bucket(
        self,
        bucket: Bucket,
        average: Callable[[BackwardPass, Bucket], torch.futures.Future[torch.Tensor]],
        wait: Callable[[], None],
    ) -> BackwardPass:
        """Return the pass that a bucket belongs to; the first of a pass finishes the one before.

        Call it on the caller's thread, with every bucket that DDP hands over.

        Args:
            bucket: The bucket.
            average: Averages a bucket of the pass.
            wait: Returns when all jobs so far have run.
        """
        if not self.residuals.wanted:
            return BackwardPass()  # a placeholder: nothing is kept
        self._refuse_other_kind(BackwardPass)
        task, running = torch_compat.graph_task_id(), self._pass
        if running is None or not running.includes(task, bucket.index()):
            self._finish_last(wait)
            self._pass = running = BackwardPass()
            if self._resumption is not None:
                running.held = self._resumption.next_pass(bucket, partial(average, running))
        running.add_bucket(task, bucket.index())
        return running

    def begin_step(self, wait: Callable[[], None]) -> TensorStep:
        """Begin a step of plain tensors that lasts until it is closed, and finish the one before.

        Args:
            wait: As for :meth:`begin_bucket`.

        Raises:
            RuntimeError: Another one is open.
        """
        if self.step_is_open:
            raise RuntimeError("step() inside step(): end the first one first")
        step = TensorStep(explicit=True)
        if self.residuals.wanted:
            self._refuse_other_kind(TensorStep)
            self._finish_last(wait)
            self._pass = step
        self._explicit = step
        return step

    def begin_tensors(self, wait: Callable[[], None]) -> TensorStep:
        """Return the step that a call on plain tensors belongs to.

        That is the open step; otherwise, inside ``backward()``, that pass; otherwise the call is a step of
        its own.
        """
        if not self.residuals.wanted:
            return TensorStep()
        self._refuse_other_kind(TensorStep)
        task, running = torch_compat.graph_task_id(), self._pass
        if not isinstance(running, TensorStep) or not running.takes(task):
            self._finish_last(wait)
            self._pass = running = TensorStep()
        running.add_call(task)
        return running

    def discard(self) -> None:
        """Discard the last pass: it changes no residuals."""
        if self._pass is not None:
            self._pass.discarded = True

    @property
    def steps(self) -> int:
        """The number of passes that count, including the last one."""
        return self._steps + (self._pass is not None and self._pass.counts)

    @property
    def of_tensors(self) -> bool:
        """Whether plain tensors are averaged, not buckets."""
        return self._kind is TensorStep

    @property
    def of_buckets(self) -> bool:
        """Whether a model's buckets are averaged, not plain tensors."""
        return self._kind is BackwardPass

    @property
    def step_is_open(self) -> bool:
        """Whether a step of plain tensors is open."""
        return self._explicit is not None and self._explicit.open

    @property
    def ended_well(self) -> bool:
        """Whether no pass is running and the last one has not failed."""
        return self._pass is None or self._pass.complete

    def losses(self) -> Callable[[Residual], torch.Tensor | None]:
        """Return a function that gives a residual as of the last pass that counts. All jobs must have run."""
        ended = self._pass
        turned: set[int] = set()
        if ended is not None and ended.counts:
            turned = {
                id(residual)
                for residual in _residuals_of(ended)
                if residual.last is not None and not bool(ended.outcome.any_not_finite(residual.last.device))
            }
        return lambda residual: residual.next if id(residual) in turned else residual.last

    def forget(self) -> None:
        """Start over as if nothing had been lost so far. All jobs must have run."""
        self.residuals.load([], [])
        self.loaded, self._pass, self._resumption = None, None, None

    def load(self, saved: SavedResiduals, *, in_saved_buckets: bool = True) -> None:
        """Continue from what another run has saved.

        Args:
            saved: The residuals of that run.
            in_saved_buckets: Average the first passes in that run's buckets, whatever buckets DDP hands over.
                If not, the caller hands over those buckets.
        """
        self.residuals.load(saved.own, saved.buckets)
        self.loaded, self._steps, self._pass = saved, saved.steps, None
        self._kind = None if saved.keys is None else TensorStep
        layout = [parameters for parameters, _, _ in saved.buckets]
        self._resumption = Resumption(layout) if in_saved_buckets and saved.keys is None else None

    def _refuse_other_kind(self, kind: type[BackwardPass]) -> None:
        if self._kind not in (None, kind):
            raise ValueError(
                "a state with error feedback is for a model's buckets or for plain tensors, not for both: "
                "make one for each"
            )
        self._kind = kind

    def _finish_last(self, wait: Callable[[], None]) -> None:
        ended, self._pass = self._pass, None
        if ended is None:
            return
        if ended.outside_of_backward or isinstance(ended, TensorStep):
            wait()  # DDP has waited for the others' jobs
        self._steps += ended.counts
        self.residuals.commit(ended)
        if self._resumption is not None and ended.held is not None and ended.complete:
            self._resumption.ended(ended.held)
        if self._resumption is not None and self._resumption.over:
            self._resumption = None
        ended.held = None  # it refers to the pass


def _residuals_of(ended: BackwardPass) -> Iterator[Residual]:
    for kept in ended.kept:
        yield from (kept.own, kept.shard)
