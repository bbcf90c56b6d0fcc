"""Average in factors: decided on the caller's thread, done by a job with two means that follow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import Average
from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Task
from ddp_quant_hooks.exchange.plan import Plan
from ddp_quant_hooks.exchange.planner import plan_average
from ddp_quant_hooks.exchange.spans import Span
from ddp_quant_hooks.exchange.values import Values
from ddp_quant_hooks.feedback.residuals import BucketResiduals, Owner, Slot, owner_length
from ddp_quant_hooks.feedback.step import Step, value_count
from ddp_quant_hooks.feedback.store import Feedback
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.kernels.rotation import signs
from ddp_quant_hooks.lowrank.factors import Arrangement, Factors, arrange, matrix_shape
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.statistics import BucketCounter

SLOTS = ("own", "factor")
"""What is kept from step to step: what was left of this rank's own values, and the right factors."""


class RoundingErrors:
    """Memory for what a rank loses of a mean by rounding, where its plan says that it rounds.

    Args:
        plan: Of the mean.
        device: Where the values are.
    """

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self._slots = plan.slots
        self._device = device
        self._errors: dict[str, torch.Tensor] = {
            name: torch.zeros(sum(map(len, spans)), dtype=torch.bfloat16, device=device)
            for name, spans in plan.slots.items()
        }

    def span(self, slot: str, start: int, length: int) -> tuple[None, torch.Tensor]:
        """Return memory for the errors of some values; nothing is added to them."""
        return None, self._errors[slot][start : start + length]

    def of_own(self, count: int, ranks: int) -> torch.Tensor:
        """Return what the mean of ``count`` values lacks of this rank's, as if it alone had lost that."""
        lost = torch.zeros(count, dtype=torch.float32, device=self._device)
        for name, spans in self._slots.items():
            errors = torch.split(self._errors[name], [*map(len, spans)])
            for span, error in zip(spans, errors, strict=True):
                lost[span.start : span.stop].add_(error, alpha=ranks * span.weight)
        return lost


@dataclass(frozen=True)
class LowRankTask:
    """How a bucket is averaged in factors.

    Attributes:
        arrangement: Which of its values have factors.
        plans: Of the mean of the left factors and the rest, and of that of the right factors, if there are
            any.
        residuals: What earlier steps have left, and the right factors.
        not_finite: See :class:`ddp_quant_hooks.exchange.exchange.Task`.
        label: Likewise.
    """

    arrangement: Arrangement
    plans: Sequence[Plan]
    residuals: BucketResiduals
    not_finite: NotFinite
    label: int


class LowRank(Average):
    """Sends factors in few bits. See :class:`ddp_quant_hooks.LowRankState`.

    Args:
        options: How factors are sent.
        rank: The number of columns of a factor.
        warm_up_steps: So many steps send all values in few bits first.
        feedback: The residuals of the state, and the right factors.
        counter: Counts what is averaged.
    """

    def __init__(
        self, options: Options, rank: int, warm_up_steps: int, feedback: Feedback, counter: BucketCounter
    ) -> None:
        super().__init__(options, feedback, counter)
        self._rank, self._warm_up_steps = rank, warm_up_steps

    def quantizes(self, owners: Sequence[Owner], tensors: Sequence[torch.Tensor], ranks: int) -> bool:
        """See :meth:`ddp_quant_hooks.averaging.Average.quantizes`: neither small buckets nor fp64."""
        del owners
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return tensors[0].dtype.to_real() in VALUE_DTYPES and nbytes >= self._options.least_bytes(ranks)

    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """See :meth:`ddp_quant_hooks.averaging.Average.terms_of`."""
        return {"matrices": [*map(shape_of, owners)]}

    def refuse_flat(self, name: str) -> None:
        """See :meth:`ddp_quant_hooks.averaging.Average.refuse_flat`."""
        self.refuse_shards(name)

    def refuse_shards(self, name: str) -> None:
        """See :meth:`ddp_quant_hooks.averaging.Average.refuse_shards`."""
        raise ValueError(f"{name}: a LowRankState averages whole matrices, and a shard is a part of one")

    def _task_of(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owners: Sequence[Owner],
        tensors: Sequence[torch.Tensor],
        label: int,
    ) -> LowRankTask:
        count, device = sum(map(value_count, tensors)), tensors[0].device
        arrangement = _arranged(tuple(map(shape_of, owners)), self._rank)
        slots = {
            "own": Slot((Span(0, count, 1.0 / group.size()),)),
            "factor": _factor_slot(arrangement, len(owners)),
        }
        residuals = self._feedback.residuals(step, owners, slots, device)
        # Without this step itself: only outside of a pass, as on a rank that has joined, it counts already.
        if self._feedback.steps - step.counts < self._warm_up_steps:
            arrangement = Arrangement((), (Span(0, count),))
        like = torch.empty(0, dtype=torch.float32, device=device)
        lengths = filter(None, map(sum, (arrangement.left_lengths, arrangement.right_lengths)))
        plans = [
            self._plan(plan_average, group, length, like, levels=self._options.levels) for length in lengths
        ]
        return LowRankTask(arrangement, plans, residuals, step.outcome.not_finite, label)

    def _average(self, group: dist.ProcessGroup, values: Values, task: LowRankTask) -> tuple[int, int]:
        factors, plans = _factors_of(values, task), iter(task.plans)
        lost = self._mean(group, factors.left_row(), task, next(plans))
        right_row = factors.right_row(lost)
        if len(right_row):
            factors.restore(self._mean(group, right_row, task, next(plans)))
        sent = sum(plan.bytes_sent for plan in task.plans)
        return sent, sum(plan.bytes_between_hosts for plan in task.plans)

    def _mean(
        self, group: dist.ProcessGroup, row: torch.Tensor, task: LowRankTask, plan: Plan
    ) -> torch.Tensor:
        """Average a row over all ranks in place, and return what this rank has lost of it."""
        errors = RoundingErrors(plan, row.device)
        of_row = Task(plan, errors.span, task.not_finite, task.label)
        exchange.average(group, of_row, Values([row]), self._scratch(row.device))
        return errors.of_own(len(row), group.size())


@lru_cache(maxsize=1024)
def _arranged(shapes: tuple[tuple[int, int], ...], rank: int) -> Arrangement:
    return arrange(shapes, rank)


def shape_of(owner: Owner) -> tuple[int, int]:
    """Return the rows and columns of an owner's real values."""
    if isinstance(owner, torch.Tensor):
        rows, columns = matrix_shape(owner.shape, owner.stride())
    else:
        rows, columns = matrix_shape(owner.shape)
    return rows, columns * owner_length(owner) // max(rows * columns, 1)


def _factor_slot(arrangement: Arrangement, owners: int) -> Slot:
    """Return where right factors are kept: those of each owner that is a matrix."""
    lengths = [0] * owners
    for part in arrangement.matrices:
        lengths[part.owner] = part.rank * part.columns
    spans = (Span(0, sum(lengths)),) if arrangement.matrices else ()
    return Slot(spans, torch.float32, lengths, _fill)


def _fill(owner: int, right: torch.Tensor) -> None:
    """Begin with signs, which are equal on all ranks."""
    del owner
    right.copy_(signs(right.numel(), right.device))


def _factors_of(values: Values, task: LowRankTask) -> Factors:
    """Return the average of a bucket that begins."""
    lengths, kept = task.arrangement.right_lengths, task.residuals.slots.get("factor")
    residual, new_residual = task.residuals.span("own", 0, values.count)
    if new_residual is None:  # nothing is kept of this bucket
        new_residual = torch.empty(values.count, dtype=torch.bfloat16, device=values.device)
    if kept is not None and kept.next is not None and not lengths:
        kept.next.copy_(kept.last)
    right, next_right = task.residuals.span("factor", 0, sum(lengths))
    if right is None or next_right is None:
        right = torch.empty(sum(lengths), dtype=torch.float32, device=values.device)
        for part in torch.split(right, lengths) if lengths else ():
            _fill(0, part)
        next_right = right
    return Factors(task.arrangement, values, residual, new_residual, right, next_right)
