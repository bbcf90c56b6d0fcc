"""Average values in few bits: by a plan, in an exchange, with residuals; some of them without compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import Average, Parts, split_owners
from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Residuals, Task
from ddp_quant_hooks.exchange.plan import Plan, Span
from ddp_quant_hooks.exchange.planner import plan_average, plan_reduce_scatter
from ddp_quant_hooks.exchange.values import Values, put_back
from ddp_quant_hooks.feedback.residuals import Owner, Slot, owner_length
from ddp_quant_hooks.feedback.step import Step, value_count
from ddp_quant_hooks.kernels import VALUE_DTYPES


class FewBitsPlan(NamedTuple):
    """How values are averaged in few bits, in every step.

    Attributes:
        plan: How those of them are that are not exact.
        slots: What a step keeps of these.
        few: Where these are, if some are exact; else ``None``.
        exact: The values that are averaged without compression.
    """

    plan: Plan
    slots: Mapping[str, Slot]
    few: tuple[Span, ...] | None = None
    exact: tuple[Span, ...] = ()


class FewBitsTask(NamedTuple):
    """How a bucket is averaged in one step.

    Attributes:
        exchange: How its values are, or those of them that are not exact.
        few: As of :class:`FewBitsPlan`.
        exact: Likewise.
    """

    exchange: Task
    few: tuple[Span, ...] | None
    exact: tuple[Span, ...]


def _keep_nothing(slot: str, start: int, length: int) -> tuple[None, None]:
    """Return the residuals of some values; see :class:`Task`."""
    del slot, start, length
    return None, None


class FewBits(Average):
    """Sends values in few bits. See :class:`ddp_quant_hooks.QuantizedAllreduceState`.

    Args:
        options: The options of the state.
        feedback: Its residuals.
        counter: Counts what is averaged.
    """

    def quantizes(self, owners: Sequence[Owner], tensors: Sequence[torch.Tensor], ranks: int) -> bool:
        """See :meth:`Average.quantizes`: neither small buckets, nor exact values alone, nor fp64."""
        if tensors[0].dtype.to_real() not in VALUE_DTYPES:
            return False
        if sum(tensor.nbytes for tensor in tensors) < self._options.least_bytes(ranks):
            return False
        return any(owner_length(owner) and not self._is_exact(owner) for owner in owners)

    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """See :meth:`Average.terms_of`."""
        if not self._options.exact_1d:
            return {}
        return {"of at most one dimension": [*map(self._is_exact, owners)]}

    def _decide(
        self, group: dist.ProcessGroup, owners: Sequence[Owner], tensors: Sequence[torch.Tensor]
    ) -> FewBitsPlan:
        few, exact = None, tuple[Span, ...]()
        count = sum(map(value_count, tensors))
        if self._options.exact_1d and any(map(self._is_exact, owners)):
            few, exact = split_owners(owners, self._is_exact)
            count = sum(map(len, few))
        plan = self._plan(plan_average, group, count, tensors[0], levels=self._options.levels)
        return FewBitsPlan(plan, self._slots(plan), few, exact)

    def _task_of(
        self,
        step: Step,
        decided: FewBitsPlan,
        owners: Sequence[Owner],
        tensors: Sequence[torch.Tensor],
        label: int,
    ) -> FewBitsTask:
        if decided.few is not None:
            owners = [owner for owner in owners if not self._is_exact(owner)]
        not_finite = step.outcome.not_finite if self._feedback.wanted else None
        task = self._task(decided, step, owners, tensors[0].device, not_finite, label)
        return FewBitsTask(task, decided.few, decided.exact)

    def _average(self, group: dist.ProcessGroup, values: Values, task: FewBitsTask) -> Parts[tuple[int, int]]:
        few = values if task.few is None else Values(values.parts_of(task.few))
        exact = values.parts_of(task.exact)
        not_finite, plan = task.exchange.not_finite, task.exchange.plan
        sent, outside = plan.bytes_sent, plan.bytes_between_hosts
        apart = None
        if exact:
            apart, more = self._mean_of_exact(group, exact, not_finite)
            sent, outside = sent + more[0], outside + more[1]
        yield from exchange.average_in_parts(group, task.exchange, few, self._scratch(values.device))
        if apart is not None:
            put_back(exact, apart)
        return sent, outside

    def refuse_flat(self, name: str) -> None:
        """See :meth:`Average.refuse_flat`."""
        if self._options.exact_1d:
            raise ValueError(f"{name}: exact_1d does not work: shards of parameters have no dimensions")

    def refuse_shards(self, name: str) -> None:
        """See :meth:`Average.refuse_shards`."""
        self.refuse_flat(name)
        levels = self._options.levels
        if levels is not None and len(levels) > 1:
            raise ValueError(f"{name}: levels={levels} do not work: a shard goes to its rank without them")

    def prepare_shards(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owner: Owner,
        shards: torch.Tensor,
        *,
        not_finite: NotFinite | None,
        label: int = 0,
    ) -> Task:
        """See :meth:`Average.prepare_shards`."""
        plan = self._plan(plan_reduce_scatter, group, value_count(shards) // group.size(), shards)
        decided = FewBitsPlan(plan, self._slots(plan))
        return self._task(decided, step, [owner], shards.device, not_finite, label)

    def run_shards(
        self, group: dist.ProcessGroup, shards: torch.Tensor, mean: torch.Tensor, task: Task
    ) -> None:
        """See :meth:`Average.run_shards`."""
        plan = task.plan
        exchange.reduce_scatter(group, task, shards, mean, self._scratch(mean.device))
        self._counter.add(
            shards.nbytes // 2, group.size(), plan.bytes_sent, plan.bytes_between_hosts, quantized=True
        )

    def _is_exact(self, owner: Owner) -> bool:
        """Return whether an owner's values are averaged without compression: parameters of one dimension."""
        return self._options.exact_1d and len(owner.shape) <= 1

    def _slots(self, plan: Plan) -> Mapping[str, Slot]:
        """Return what a step keeps of what this rank rounds."""
        return {name: Slot(spans) for name, spans in plan.slots.items()} if self._feedback.wanted else {}

    def _task(
        self,
        decided: FewBitsPlan,
        step: Step,
        owners: Sequence[Owner],
        device: torch.device,
        not_finite: NotFinite | None,
        label: int,
    ) -> Task:
        residual: Residuals = _keep_nothing
        if decided.slots:
            residual = self._feedback.residuals(step, owners, decided.slots, device).span
        return Task(decided.plan, residual, not_finite, label)
