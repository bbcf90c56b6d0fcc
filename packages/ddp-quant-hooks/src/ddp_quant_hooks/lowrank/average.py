"""Average in factors: decided on the caller's thread, done by a job with two means that follow each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import Average
from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Parts, Task
from ddp_quant_hooks.exchange.plan import Plan, Span
from ddp_quant_hooks.exchange.planner import plan_average
from ddp_quant_hooks.exchange.values import Values
from ddp_quant_hooks.feedback.names import ModelNames
from ddp_quant_hooks.feedback.residuals import BucketResiduals, Key, Owner, Slot, owner_length
from ddp_quant_hooks.feedback.step import Step
from ddp_quant_hooks.feedback.store import Feedback
from ddp_quant_hooks.kernels import Layout
from ddp_quant_hooks.kernels.rotation import signs
from ddp_quant_hooks.lowrank.factors import Arrangement, Factors, RankRule, arrange, matrix_shape
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.statistics import BucketCounter

SLOTS = ("own", "factor", "rest")
"""What is kept from step to step: what was left of this rank's own values, the right factors, and the errors
of means of rests, if these are sent in one bit."""

ONE_BIT = Layout("int1", 256)
"""Signs and the mean magnitude of 256 values: 0.14 bytes a value."""


class ExactNames:
    """Patterns of names, as for files: ``*`` stands for any characters.

    Args:
        patterns: Of names of parameters, without the prefixes of wrappers, and of keys.
        names: The parameters of the model.

    Raises:
        TypeError: ``patterns`` is not a sequence of strings.
    """

    def __init__(self, patterns: Any, names: ModelNames) -> None:
        is_sequence = isinstance(patterns, Sequence) and not isinstance(patterns, str)
        if not (is_sequence and all(isinstance(each, str) for each in patterns)):
            raise TypeError(f"exact must be a sequence of patterns of names, got {patterns!r}")
        self.patterns: tuple[str, ...] = tuple(patterns)
        """As given."""
        self._names = names

    def require_matches(self, names: Iterable[str]) -> None:
        """Raise ``ValueError`` if a pattern fits none of a model's names: it may be misspelled."""
        known = [*names]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in known):
                raise ValueError(
                    f"exact has {pattern!r}, and no parameter of the model has such a name; there are "
                    f"{', '.join(known)[:200]!r}"
                )

    def includes(self, owner: Owner) -> bool:
        """Return whether an owner's values are averaged without compression.

        Raises:
            ValueError: It is a parameter without a name: the state is not bound to its model.
        """
        if not self.patterns:
            return False
        name = owner.name if isinstance(owner, Key) else self._names.find(owner)
        if name is None:
            raise ValueError(
                f"exact={list(self.patterns)} needs the names of parameters: bind the state to its model by "
                "bind(ddp) first"
            )
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


@dataclass(frozen=True)
class LowRankOptions:
    """What a user decides about factors; see :class:`ddp_quant_hooks.LowRankState`."""

    rank: RankRule
    residual_bits: Literal[1] | None
    warm_up_steps: int
    exact: ExactNames


class RoundingErrors:
    """Memory for what a rank loses of a mean by rounding, where its plan says that it rounds.

    Args:
        plan: Of the mean.
        device: Where the values are.
        residuals: Keep the errors of means that this rank computes in the slot ``"rest"``, to be added to the
            next ones: errors of one bit are too large to be added to this rank's own values. ``None``: they
            are this rank's loss, too.
    """

    def __init__(self, plan: Plan, device: torch.device, residuals: BucketResiduals | None = None) -> None:
        self._slots = {
            name: spans for name, spans in plan.slots.items() if residuals is None or name == "own"
        }
        self._residuals, self._device = residuals, device
        self._errors: dict[str, torch.Tensor] = {
            name: torch.zeros(sum(map(len, spans)), dtype=torch.bfloat16, device=device)
            for name, spans in self._slots.items()
        }

    def span(self, slot: str, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return what is added to some values, and memory for their errors."""
        if self._residuals is not None and slot != "own":
            return self._residuals.span("rest", start, length)
        return None, self._errors[slot][start : start + length]

    def of_own(self, count: int, ranks: int) -> torch.Tensor:
        """Return what the mean of ``count`` values lacks of this rank's, as if it alone had lost that."""
        lost = torch.zeros(count, dtype=torch.float32, device=self._device)
        for name, spans in self._slots.items():
            errors = torch.split(self._errors[name], [*map(len, spans)])
            for span, error in zip(spans, errors, strict=True):
                lost[span.start : span.stop].add_(error, alpha=ranks * span.weight)
        return lost


class Section(NamedTuple):
    """Some matrices of a bucket, which are computed while those of other sections are sent.

    Attributes:
        arrangement: Which values have factors.
        plans: Of the mean of the left factors and the rest, and of that of the right factors, if there are
            any.
    """

    arrangement: Arrangement
    plans: Sequence[Plan]


@dataclass(frozen=True)
class Way:
    """How a bucket's values are averaged in factors, or without any.

    Attributes:
        sections: All of them.
        rest_plan: Of the mean of what factors leave out; ``None``: it is not sent.
    """

    sections: Sequence[Section]
    rest_plan: Plan | None

    @cached_property
    def matrix_lengths(self) -> list[int]:
        """The number of values of each section's matrices."""
        return [sum(section.arrangement.matrix_lengths) for section in self.sections]

    @cached_property
    def bytes_sent(self) -> tuple[int, int]:
        """The bytes that a rank sends for all means, and those of them that leave the host."""
        plans = [plan for section in self.sections for plan in section.plans]
        if self.rest_plan is not None:
            plans.append(self.rest_plan)
        return sum(plan.bytes_sent for plan in plans), sum(plan.bytes_between_hosts for plan in plans)


class LowRankPlan(NamedTuple):
    """What is decided about a bucket for all steps.

    Attributes:
        slots: What is kept from step to step.
        warming_up: How the first steps average.
        warm: How later ones do.
    """

    slots: Mapping[str, Slot]
    warming_up: Way
    warm: Way


class LowRankTask(NamedTuple):
    """How a bucket is averaged in one step.

    Attributes:
        way: In factors, or without any.
        residuals: What earlier steps have left, and the right factors.
        not_finite: See :class:`ddp_quant_hooks.exchange.exchange.Task`.
        label: Likewise.
    """

    way: Way
    residuals: BucketResiduals
    not_finite: NotFinite | None
    label: int


class LowRank(Average):
    """Sends factors in few bits. See :class:`ddp_quant_hooks.LowRankState`.

    Args:
        options: How factors are sent.
        own: What only this average has.
        feedback: The residuals of the state, and the right factors.
        counter: Counts what is averaged.
    """

    _pauses = True  # two exchanges follow each other

    def __init__(
        self, options: Options, own: LowRankOptions, feedback: Feedback, counter: BucketCounter
    ) -> None:
        super().__init__(options, feedback, counter)
        self._own = own

    def is_exact(self, owner: Owner) -> bool:
        """See :meth:`ddp_quant_hooks.averaging.Average.is_exact`, and :meth:`ExactNames.includes`."""
        return self._own.exact.includes(owner)

    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """See :meth:`ddp_quant_hooks.averaging.Average.terms_of`."""
        return {"matrices": [*map(shapes_of, owners)]}

    def refuse_flat(self, name: str) -> None:
        """See :meth:`ddp_quant_hooks.averaging.Average.refuse_flat`."""
        if names := [*self._own.exact.patterns]:
            raise ValueError(f"{name}: exact={names} does not work: shards of parameters have no names")

    def refuse_shards(self, name: str) -> None:
        """See :meth:`ddp_quant_hooks.averaging.Average.refuse_shards`."""
        raise ValueError(f"{name}: a LowRankState averages whole matrices, and a shard is a part of one")

    def _plan_of(
        self, group: dist.ProcessGroup, owners: Sequence[Owner], count: int, like: torch.Tensor
    ) -> LowRankPlan:
        of_owners = [*map(shapes_of, owners)]
        shapes = tuple((place, *shape) for place, some in enumerate(of_owners) for shape in some)
        arrangement = _arranged(shapes, self._own.rank)
        in_fp32 = torch.empty(0, dtype=torch.float32, device=like.device)
        rest_plan = self._plan_of_rest(group, arrangement, in_fp32)
        slots = {
            "own": Slot((Span(0, count, 1.0 / group.size()),)),
            "factor": _factor_slot(arrangement, len(owners)),
            "rest": _rest_slot(arrangement, rest_plan),
        }
        without_factors = Arrangement((), (Span(0, count),))
        ways = [
            Way([Section(one, self._plans_of(group, one, in_fp32)) for one in sections], rest)
            for sections, rest in (([without_factors], None), (arrangement.in_sections(), rest_plan))
        ]
        return LowRankPlan(slots, *ways)

    def _plans_of(
        self, group: dist.ProcessGroup, arrangement: Arrangement, like: torch.Tensor
    ) -> Sequence[Plan]:
        """Return the plans of the means that follow each other."""
        lengths = filter(None, map(sum, (arrangement.left_lengths, arrangement.right_lengths)))
        return [
            self._plan(plan_average, group, length, like, levels=self._options.levels) for length in lengths
        ]

    def _task_of(
        self,
        step: Step,
        plan: LowRankPlan,
        owners: Sequence[Owner],
        device: torch.device,
        not_finite: NotFinite | None,
        label: int,
    ) -> LowRankTask:
        residuals = self._feedback.residuals(step, owners, plan.slots, device)
        # Without this step itself: only outside of a pass, as on a rank that has joined, it counts already.
        steps = self._feedback.steps - step.counts
        warms_up = steps < self._own.warm_up_steps and not self.skips_first_steps
        return LowRankTask(plan.warming_up if warms_up else plan.warm, residuals, not_finite, label)

    def _average(self, group: dist.ProcessGroup, values: Values, task: LowRankTask) -> Parts[tuple[int, int]]:
        way, left_over = task.way, None
        if way.rest_plan is not None:
            left_over = torch.empty(sum(way.matrix_lengths), dtype=torch.bfloat16, device=values.device)
        factors = _factors_of(values, way, task.residuals, left_over)
        yield from exchange.together(
            self._average_section(group, one, section, task._replace(label=hash((task.label, number))))
            for number, (one, section) in enumerate(zip(factors, way.sections, strict=True))
        )
        if left_over is not None and way.rest_plan is not None:
            row = left_over.float()
            lost = yield from self._mean(group, row, task, way.rest_plan, task.residuals)
            of_sections = [torch.split(one, way.matrix_lengths) for one in (row, lost)]
            for one, rest, error in zip(factors, *of_sections, strict=True):
                one.add(rest, error)
        return way.bytes_sent

    def _average_section(
        self, group: dist.ProcessGroup, factors: Factors, section: Section, task: LowRankTask
    ) -> exchange.Exchange:
        """Average the factors of a section, and write the mean."""
        lost = yield from self._mean(group, factors.left_row(), task, section.plans[0])
        right_row = factors.right_row(lost)
        if len(right_row):
            lost = yield from self._mean(group, right_row, task, section.plans[1])
            factors.restore(lost)

    def _mean(
        self,
        group: dist.ProcessGroup,
        row: torch.Tensor,
        task: LowRankTask,
        plan: Plan,
        residuals: BucketResiduals | None = None,
    ) -> Parts[torch.Tensor]:
        """Average a row over all ranks in place, and return what this rank has lost of it.

        ``residuals``: see :class:`RoundingErrors`.
        """
        errors = RoundingErrors(plan, row.device, residuals)
        of_row = Task(plan, errors.span, task.not_finite, task.label)
        yield from exchange.average_in_parts(group, of_row, Values([row]), self._scratch(row.device))
        return errors.of_own(len(row), group.size())

    def _plan_of_rest(
        self, group: dist.ProcessGroup, arrangement: Arrangement, like: torch.Tensor
    ) -> Plan | None:
        """Return the plan for what factors leave out, if it is sent."""
        count = sum(arrangement.matrix_lengths)
        if self._own.residual_bits is None or not count:
            return None
        layouts, levels = (ONE_BIT, ONE_BIT), self._options.levels
        return self._plan(plan_average, group, count, like, layouts, levels=levels)


@lru_cache(maxsize=1024)
def _arranged(shapes: tuple[tuple[int, int, int], ...], rank: RankRule) -> Arrangement:
    owners = [owner for owner, *_ in shapes]
    return arrange([(rows, columns) for _, rows, columns in shapes], rank, owners)


def shapes_of(owner: Owner) -> list[tuple[int, int]]:
    """Return the rows and columns of each matrix of an owner's real values, one after another."""
    if isinstance(owner, torch.Tensor):
        found = [matrix_shape(owner.shape, owner.stride())]
    else:
        found = [matrix_shape(shape) for _, shape in owner.contents or [(0, owner.shape)]]
    count = sum(rows * columns for rows, columns in found)
    return [(rows, columns * owner_length(owner) // max(count, 1)) for rows, columns in found]


def _factor_slot(arrangement: Arrangement, owners: int) -> Slot:
    """Return where right factors are kept: those of each owner that is a matrix."""
    lengths = [0] * owners
    for part in arrangement.matrices:
        lengths[part.owner] += part.rank * part.columns
    spans = (Span(0, sum(lengths)),) if arrangement.matrices else ()
    return Slot(spans, torch.float32, lengths, _fill)


def _rest_slot(arrangement: Arrangement, plan: Plan | None) -> Slot:
    """Return where the errors of means of rests are kept: of the matrices alone, one after another."""
    spans = () if plan is None else plan.slots.get("shard", ())
    return Slot(tuple(here for span in spans for here in arrangement.of_matrices(span)))


def _fill(owner: int, right: torch.Tensor) -> None:
    """Begin with signs, which are equal on all ranks."""
    del owner
    right.copy_(signs(right.numel(), right.device))


def _factors_of(
    values: Values, way: Way, residuals: BucketResiduals, left_over: torch.Tensor | None
) -> list[Factors]:
    """Return the averages of the sections of a bucket that begins."""
    arrangements = [section.arrangement for section in way.sections]
    lengths = [length for one in arrangements for length in one.right_lengths]
    kept = residuals.slots.get("factor")
    residual, new_residual = residuals.span("own", 0, values.count)
    if new_residual is None:  # nothing is kept of this bucket
        new_residual = torch.empty(values.count, dtype=torch.bfloat16, device=values.device)
    if kept is not None and kept.next is not None and not lengths:
        kept.next.copy_(kept.last)
    right, next_right = residuals.span("factor", 0, sum(lengths))
    if right is None or next_right is None:
        right = torch.empty(sum(lengths), dtype=torch.float32, device=values.device)
        for part in torch.split(right, lengths) if lengths else ():
            _fill(0, part)
        next_right = right
    of_each = [sum(one.right_lengths) for one in arrangements]
    left_overs: Sequence[torch.Tensor | None] = [None] * len(arrangements)
    if left_over is not None:
        left_overs = torch.split(left_over, way.matrix_lengths)
    rights, next_rights = torch.split(right, of_each), torch.split(next_right, of_each)
    return [
        Factors(arrangement, values, residual, new_residual, last, following, left)
        for arrangement, last, following, left in zip(
            arrangements, rights, next_rights, left_overs, strict=True
        )
    ]
