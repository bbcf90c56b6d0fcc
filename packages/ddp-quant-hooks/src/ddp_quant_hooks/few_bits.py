"""Average values in few bits: by a plan, in an exchange, with residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import Average
from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Parts, Task
from ddp_quant_hooks.exchange.plan import Plan
from ddp_quant_hooks.exchange.planner import plan_average, plan_reduce_scatter
from ddp_quant_hooks.exchange.values import Values
from ddp_quant_hooks.feedback.residuals import Owner, Slot
from ddp_quant_hooks.feedback.step import Step, value_count


class FewBits(Average):
    """Sends values in few bits. See :class:`ddp_quant_hooks.QuantizedAllreduceState`.

    Args:
        options: The options of the state.
        feedback: Its residuals.
        counter: Counts what is averaged.
    """

    def is_exact(self, owner: Owner) -> bool:
        """See :meth:`Average.is_exact`: parameters of one dimension are, if that is wanted."""
        return self._options.exact_1d and len(owner.shape) <= 1

    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """See :meth:`Average.terms_of`."""
        if not self._options.exact_1d:
            return {}
        return {"of at most one dimension": [*map(self.is_exact, owners)]}

    def _plan_of(
        self, group: dist.ProcessGroup, owners: Sequence[Owner], count: int, like: torch.Tensor
    ) -> Plan:
        del owners
        return self._plan(plan_average, group, count, like, levels=self._options.levels)

    def _task_of(
        self,
        step: Step,
        plan: Plan,
        owners: Sequence[Owner],
        device: torch.device,
        not_finite: NotFinite | None,
        label: int,
    ) -> Task:
        slots: Mapping[str, Slot] = {}
        if self._feedback.wanted:
            slots = {name: Slot(spans) for name, spans in plan.slots.items()}
        residuals = self._feedback.residuals(step, owners, slots, device)
        return Task(plan, residuals.span, not_finite, label)

    def _average(self, group: dist.ProcessGroup, values: Values, task: Task) -> Parts[tuple[int, int]]:
        yield from exchange.average_in_parts(group, task, values, self._scratch(values.device))
        return task.plan.bytes_sent, task.plan.bytes_between_hosts

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
        """Do as :meth:`prepare`, for all ranks' shards, one after another, each for another rank.

        Args:
            group: The process group whose ranks average.
            step: The step that they belong to.
            owner: What all of them belong to.
            shards: This rank's values for all ranks.
            not_finite: Called with flags of this rank's shard only.
            label: As for :meth:`prepare`.
        """
        plan = self._plan(plan_reduce_scatter, group, value_count(shards) // group.size(), shards)
        return self._task_of(step, plan, [owner], shards.device, not_finite, label)

    def run_shards(
        self, group: dist.ProcessGroup, shards: torch.Tensor, mean: torch.Tensor, task: Task
    ) -> None:
        """Average every rank's shard on that rank, and count that as half an average of all of them. A job.

        Args:
            group: The process group whose ranks average.
            shards: This rank's values for all ranks, flat, one shard of equal length after another.
            mean: The output for the mean of this rank's shard; flat.
            task: What :meth:`prepare_shards` has returned.
        """
        plan = task.plan
        exchange.reduce_scatter(group, task, shards, mean, self._scratch(mean.device))
        self._counter.add(
            shards.nbytes // 2, group.size(), plan.bytes_sent, plan.bytes_between_hosts, quantized=True
        )
