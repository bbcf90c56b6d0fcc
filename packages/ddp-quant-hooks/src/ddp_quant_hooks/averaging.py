"""Average values in few bits: decided on the caller's thread, done by a job on the state's worker.

Buckets of ``DistributedDataParallel``, plain tensors and the gradients of FSDP2 are averaged here.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Task
from ddp_quant_hooks.exchange.placement import Placement
from ddp_quant_hooks.exchange.plan import Formats, Plan, plan_average, plan_reduce_scatter
from ddp_quant_hooks.exchange.scratch import Scratch
from ddp_quant_hooks.exchange.values import Values, put_back
from ddp_quant_hooks.feedback.step import Step
from ddp_quant_hooks.feedback.store import Feedback, Key, Owner
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.statistics import Counter, bytes_around_ring, relative_error
from dist_utils.process_groups import runs_on_host


class Averager:
    """Plans and averages for one state. Holds no reference to it: jobs keep this alive.

    Args:
        options: The options of the state.
        feedback: Its residuals.
        counter: Counts what is averaged.

    Attributes:
        placement: Where the ranks are; known when the ranks have agreed.
    """

    def __init__(self, options: Options, feedback: Feedback, counter: Counter) -> None:
        self._options, self._feedback, self._counter = options, feedback, counter
        self._layouts = options.scatter_layout, options.gather_layout
        self.placement: Placement | None = None
        self._scratches: dict[torch.device, list[Scratch]] = {}
        self._prepared = 0

    def start_over(self) -> None:
        """Free memory, forget where ranks are, and sample the next bucket: ranks may have been at others."""
        self.placement, self._prepared = None, 0
        self._scratches.clear()

    def place(self, placement: Placement) -> None:
        """Learn where the ranks are.

        Raises:
            ValueError: The levels that the user has chosen do not fit the ranks and their hosts.
        """
        self.start_over()
        plan_average(placement, 0, 1, Formats(*self._layouts, 4), levels=self._options.levels)
        self.placement = placement

    def quantizes(self, dtype: torch.dtype, nbytes: int, ranks: int) -> bool:
        """Return whether so many bytes of a dtype, real or complex, are sent in few bits."""
        return dtype.to_real() in VALUE_DTYPES and nbytes >= self._options.least_bytes(ranks)

    def bytes_of_ring(self, group: dist.ProcessGroup, nbytes: int) -> tuple[int, int]:
        """Return the bytes that a rank sends in a ring all-reduce, and those of them to another host."""
        hosts = self.placement.hosts if self.placement is not None else (0,) * group.size()
        return bytes_around_ring(nbytes, range(group.size()), hosts, group.rank())

    def prepare(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owners: Sequence[Owner],
        count: int,
        like: torch.Tensor,
        *,
        label: int = 0,
    ) -> Task:
        """Decide how values are averaged in few bits. On the caller's thread, in the same order on all ranks.

        Args:
            group: The process group whose ranks average.
            step: The step that they belong to.
            owners: The parameters or keys that the values belong to, in their order.
            count: The number of values.
            like: A tensor of their dtype and on their device.
            label: See :class:`ddp_quant_hooks.exchange.exchange.Task`.
        """
        plan = self._plan(plan_average, group, count, like, levels=self._options.levels)
        residuals = self._feedback.residuals(step, owners, plan.own, plan.means, like.device)
        not_finite = step.outcome.not_finite if self._feedback.wanted else None
        sampled = is_sampled(self._prepared, self._options.sample_every)
        self._prepared += 1
        return Task(plan, residuals, not_finite, label, sampled)

    def prepare_reduce_scatter(
        self,
        group: dist.ProcessGroup,
        step: Step,
        key: Key,
        like: torch.Tensor,
        *,
        not_finite: NotFinite | None,
        label: int,
    ) -> Task:
        """Do as :meth:`prepare`, for all ranks' shards, one after another, to which one key belongs.

        Args:
            group: The process group whose ranks average.
            step: The step that they belong to.
            key: What they belong to.
            like: A tensor of their dtype and on their device.
            not_finite: Called with flags of this rank's shard only.
            label: See :class:`ddp_quant_hooks.exchange.exchange.Task`.
        """
        plan = self._plan(plan_reduce_scatter, group, key.count // group.size(), like)
        residuals = self._feedback.residuals(step, [key], plan.own, plan.means, like.device)
        return Task(plan, residuals, not_finite, label)

    def average(
        self,
        group: dist.ProcessGroup,
        values: Values,
        task: Task,
        *,
        exact: Sequence[torch.Tensor] = (),
    ) -> None:
        """Average values in place, the same bits on all ranks, and count them. A job.

        Args:
            group: The process group whose ranks average.
            values: All values.
            task: As all ranks have decided.
            exact: More tensors of the bucket, which are averaged without compression.
        """
        sent, outside = task.plan.bytes_sent, task.plan.bytes_between_hosts
        reference = apart = error = None
        if task.sampled:
            reference = values.to(torch.float32).div_(group.size())
            dist.all_reduce(reference, group=group)
        if exact:
            apart = _set_apart(exact, group.size())
            dist.all_reduce(apart, group=group)
            if task.not_finite is not None:
                task.not_finite(~apart.isfinite().all())
        for beside in (reference, apart):
            if beside is not None:
                more = self.bytes_of_ring(group, beside.nbytes)
                sent, outside = sent + more[0], outside + more[1]
        exchange.average(group, task, values, self._scratch(values.device))
        if apart is not None:
            put_back(exact, apart)
        if reference is not None:
            error = relative_error(values.to(torch.float32), reference)
        self._counter.add(
            values.nbytes + sum(tensor.nbytes for tensor in exact),
            group.size(),
            sent,
            outside,
            quantized=True,
            error=error,
        )

    def reduce_scatter(
        self, group: dist.ProcessGroup, shards: torch.Tensor, mean: torch.Tensor, task: Task
    ) -> None:
        """Average every rank's shard on that rank, and count that as half an average of all of them. A job.

        Args:
            group: The process group whose ranks average.
            shards: This rank's values for all ranks, flat, one shard of equal length after another.
            mean: The output for the mean of this rank's shard; flat.
            task: As all ranks have decided.
        """
        plan = task.plan
        exchange.reduce_scatter(group, task, shards, mean, self._scratch(mean.device))
        self._counter.add(
            shards.nbytes // 2, group.size(), plan.bytes_sent, plan.bytes_between_hosts, quantized=True
        )

    def count_plain(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Count what was averaged without compression."""
        self._counter.add(nbytes, group.size(), *self.bytes_of_ring(group, nbytes), quantized=False)

    def _plan(
        self,
        plan: Callable[..., Plan],
        group: dist.ProcessGroup,
        count: int,
        like: torch.Tensor,
        **options: Any,
    ) -> Plan:
        assert self.placement is not None, "the ranks have agreed on where they are"
        formats = Formats(*self._layouts, like.dtype.to_real().itemsize)
        on_streams = not runs_on_host(group, like.device)
        return plan(self.placement, group.rank(), count, formats, on_streams=on_streams, **options)

    def _scratch(self, device: torch.device) -> list[Scratch]:
        if is_captured(device):
            return []  # memory of the graph, whose replays use it after ours was freed
        return self._scratches.setdefault(device, [])


def is_sampled(number: int, every: int) -> bool:
    """Return whether a bucket is the one in ``every`` that is sampled, by its number; with 0 none is.

    The first one is; of the next so many buckets one at any place, the same on all ranks: at a fixed place it
    could always be the same bucket of a backward pass.
    """
    if every == 0:
        return False
    turn, place = divmod(number, every)
    return place == (zlib.crc32(turn.to_bytes(8, "little")) % every if turn else 0)


def is_captured(device: torch.device) -> bool:
    """Return whether what runs on a device now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@functools.lru_cache(maxsize=64)  # asked for with every bucket
def plan_digest(options: Options, ranks: int) -> str:
    """Return a digest of how so many ranks average, equal on ranks whose packages plan alike."""
    formats = Formats(options.scatter_layout, options.gather_layout, 4)
    plans = [
        plan(place, 0, count, formats, on_streams=on_streams)
        for place in (Placement(tuple(range(ranks)), "flat"), Placement((0, 0, 1), "full"))
        for plan, count in ((plan_average, 1 << 24), (plan_reduce_scatter, 1 << 20))
        for on_streams in (True, False)
    ]
    return hashlib.sha256(repr(plans).encode()).hexdigest()[:16]


def _set_apart(gradients: Sequence[torch.Tensor], world_size: int) -> torch.Tensor:
    """Return a rank's shares of the means of some gradients, for an all-reduce."""
    apart = torch.cat([gradient.flatten() for gradient in gradients])
    return apart.to(torch.promote_types(apart.dtype, torch.float32)).div_(world_size)
