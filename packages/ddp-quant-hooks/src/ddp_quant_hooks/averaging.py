"""Average values: decided on the caller's thread, done by a job on the state's worker.

Buckets of ``DistributedDataParallel``, plain tensors and the gradients of FSDP2 are averaged here.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange import exchange
from ddp_quant_hooks.exchange.exchange import NotFinite, Task
from ddp_quant_hooks.exchange.placement import Placement, choose_placement
from ddp_quant_hooks.exchange.plan import Formats, Plan
from ddp_quant_hooks.exchange.planner import plan_average, plan_reduce_scatter
from ddp_quant_hooks.exchange.scratch import Scratch
from ddp_quant_hooks.exchange.spans import Span
from ddp_quant_hooks.exchange.values import Values, put_back
from ddp_quant_hooks.feedback.residuals import Owner, Slot, owner_length
from ddp_quant_hooks.feedback.step import Step, value_count
from ddp_quant_hooks.feedback.store import Feedback
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.statistics import BucketCounter, bytes_around_ring
from dist_utils.process_groups import runs_on_host


class Average(ABC):
    """What a state does with values that all ranks average.

    It knows no state: jobs keep it alive, and a state must not end on its own worker's thread.

    Args:
        counter: Counts what is averaged.
    """

    def __init__(self, counter: BucketCounter) -> None:
        self._counter = counter
        self._hosts: tuple[int, ...] | None = None
        self._links: Sequence[Mapping[str, str]] = ()
        self._logged_as: str | None = None

    def start_over(self) -> None:
        """Free memory, and forget what the ranks have told each other: they may have to agree again."""
        self._hosts = None

    def learn_hosts(
        self, hosts: Sequence[int], links: Sequence[Mapping[str, str]], logged_as: str | None
    ) -> None:
        """Learn where the ranks are; they have agreed on it.

        Args:
            hosts: For each rank, the number of its host.
            links: For each rank and type of device, what
                :func:`ddp_quant_hooks.exchange.placement.link_inside_host` returned there.
            logged_as: The name of the state in the log; ``None``: another rank writes it.
        """
        self.start_over()
        self._hosts, self._links, self._logged_as = tuple(hosts), links, logged_as

    @abstractmethod
    def quantizes(self, owners: Sequence[Owner], tensors: Sequence[torch.Tensor], ranks: int) -> bool:
        """Return whether values are averaged here, and not without compression; the same on all ranks.

        Args:
            owners: The parameters or keys that the values belong to, in their order.
            tensors: The tensors that they are in, real or complex: one for each owner, or one for all.
            ranks: How many ranks average.
        """

    @abstractmethod
    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """Return what ranks must have alike in a call, besides lengths and dtypes, by name."""

    @abstractmethod
    def prepare(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owners: Sequence[Owner],
        tensors: Sequence[torch.Tensor],
        *,
        label: int = 0,
    ) -> Any:
        """Decide how values are averaged, and return that for :meth:`run`.

        On the caller's thread, in the same order on all ranks.

        Args:
            group: The process group whose ranks average.
            step: The step that they belong to.
            owners: As for :meth:`quantizes`.
            tensors: Likewise. Their values are not read yet.
            label: See :class:`ddp_quant_hooks.exchange.exchange.Task`.

        Raises:
            ValueError: An option does not fit the ranks, or their hosts; on all of them.
        """

    @abstractmethod
    def run(self, group: dist.ProcessGroup, values: Values, task: Any) -> None:
        """Average values in place, the same bits on all ranks, and count them. A job.

        Args:
            group: The process group whose ranks average.
            values: All values.
            task: What :meth:`prepare` has returned.
        """

    @abstractmethod
    def refuse_flat(self, name: str) -> None:
        """Raise ``ValueError`` if values need the shapes of tensors, which FSDP's flat gradients do not have.

        Args:
            name: What hands over flat values, for the error.
        """

    def refuse_shards(self, name: str) -> None:
        """Raise unless :meth:`prepare_shards` works.

        Args:
            name: Of the function that wants it, for the error.

        Raises:
            ValueError: It does not.
        """
        raise ValueError(f"{name}: the state does not average shards")

    def prepare_shards(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owner: Owner,
        shards: torch.Tensor,
        *,
        not_finite: NotFinite | None,
        label: int = 0,
    ) -> Any:
        """Do as :meth:`prepare`, for all ranks' shards, one after another, each for another rank.

        Args:
            group: The process group whose ranks average.
            step: The step that they belong to.
            owner: What all of them belong to.
            shards: This rank's values for all ranks.
            not_finite: Called with flags of this rank's shard only.
            label: As for :meth:`prepare`.
        """
        raise NotImplementedError

    def run_shards(
        self, group: dist.ProcessGroup, shards: torch.Tensor, mean: torch.Tensor, task: Any
    ) -> None:
        """Average every rank's shard on that rank, and count that as half an average of all of them. A job.

        Args:
            group: The process group whose ranks average.
            shards: This rank's values for all ranks, flat, one shard of equal length after another.
            mean: The output for the mean of this rank's shard; flat.
            task: What :meth:`prepare_shards` has returned.
        """
        raise NotImplementedError

    def bytes_of_ring(self, group: dist.ProcessGroup, nbytes: int) -> tuple[int, int]:
        """Return the bytes that a rank sends in a ring all-reduce, and those of them to another host."""
        hosts = (0,) * group.size() if self._hosts is None else self._hosts
        return bytes_around_ring(nbytes, range(group.size()), hosts, group.rank())

    def count_plain(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Count what was averaged without compression."""
        self._counter.add(nbytes, group.size(), *self.bytes_of_ring(group, nbytes), quantized=False)


class PlannedAverage(Average):
    """The base of averages that send values in few bits, by plans that know hosts.

    Args:
        options: The options of the state.
        feedback: What it keeps from step to step.
        counter: Counts what is averaged.
    """

    def __init__(self, options: Options, feedback: Feedback, counter: BucketCounter) -> None:
        super().__init__(counter)
        self._options, self._feedback = options, feedback
        self._placements: dict[str, Placement] = {}
        self._scratches: dict[torch.device, list[Scratch]] = {}
        self._prepared = 0

    def start_over(self) -> None:
        """Free memory, forget where ranks are, and sample the next bucket: ranks may have been at others."""
        super().start_over()
        self._prepared = 0
        self._placements.clear()
        self._scratches.clear()

    def learn_hosts(
        self, hosts: Sequence[int], links: Sequence[Mapping[str, str]], logged_as: str | None
    ) -> None:
        """Learn where the ranks are. See :meth:`Average.learn_hosts`.

        Raises:
            ValueError: Levels do not fit the ranks, or their hosts.
        """
        super().learn_hosts(hosts, links, logged_as)
        # How many levels there can be depends on hosts alone, and not on the links inside them.
        placement = self._choose_placement(next(iter(links[0])), None)
        formats = Formats(*self._options.layouts(torch.float32), 4)
        plan_average(placement, 0, 1, formats, levels=self._options.levels)

    def _plan(
        self,
        plan: Callable[..., Plan],
        group: dist.ProcessGroup,
        count: int,
        like: torch.Tensor,
        **options: Any,
    ) -> Plan:
        dtype = like.dtype.to_real()
        formats = Formats(*self._options.layouts(dtype), dtype.itemsize)
        on_streams = not runs_on_host(group, like.device)
        placement = self._placement(like.device.type)
        return plan(placement, group.rank(), count, formats, on_streams=on_streams, **options)

    def _placement(self, device_type: str) -> Placement:
        """Return how ranks with such devices average inside hosts; chosen when it is first asked for."""
        if device_type not in self._placements:
            self._placements[device_type] = self._choose_placement(device_type, self._logged_as)
        return self._placements[device_type]

    def _choose_placement(self, device_type: str, logged_as: str | None) -> Placement:
        assert self._hosts is not None, "the ranks have agreed on where they are"
        options, links = self._options, [link[device_type] for link in self._links]
        return choose_placement(logged_as, self._hosts, links, options.intra_node, options.bits)

    def _scratch(self, device: torch.device) -> list[Scratch]:
        if is_captured(device):
            return []  # memory of the graph, whose replays use it after ours was freed
        return self._scratches.setdefault(device, [])


@dataclass(frozen=True)
class FewBitsTask:
    """How a bucket is averaged in few bits.

    Attributes:
        exchange: How its values are, or those of them that are not exact.
        few: Where these are, if some are exact; else ``None``.
        exact: The values that are averaged without compression.
        sampled: Whether the error is measured.
    """

    exchange: Task
    few: tuple[Span, ...] | None
    exact: tuple[Span, ...]
    sampled: bool


class FewBits(PlannedAverage):
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

    def prepare(
        self,
        group: dist.ProcessGroup,
        step: Step,
        owners: Sequence[Owner],
        tensors: Sequence[torch.Tensor],
        *,
        label: int = 0,
    ) -> FewBitsTask:
        """See :meth:`Average.prepare`."""
        few, exact = None, tuple[Span, ...]()
        count = sum(map(value_count, tensors))
        if any(map(self._is_exact, owners)):
            few, exact = self._split(owners)
            owners = [owner for owner in owners if not self._is_exact(owner)]
            count = sum(map(len, few))
        plan = self._plan(plan_average, group, count, tensors[0], levels=self._options.levels)
        not_finite = step.outcome.not_finite if self._feedback.wanted else None
        task = self._task(plan, step, owners, tensors[0].device, not_finite, label)
        sampled = is_sampled(self._prepared, self._options.sample_every)
        self._prepared += 1
        return FewBitsTask(task, few, exact, sampled)

    def run(self, group: dist.ProcessGroup, values: Values, task: FewBitsTask) -> None:
        """See :meth:`Average.run`."""
        few = values if task.few is None else Values(values.parts_of(task.few))
        exact = values.parts_of(task.exact)
        not_finite, plan = task.exchange.not_finite, task.exchange.plan
        sent, outside = plan.bytes_sent, plan.bytes_between_hosts
        reference = apart = error = None
        if task.sampled:
            reference = few.to(torch.float32).div_(group.size())
            dist.all_reduce(reference, group=group)
        if exact:
            apart = _set_apart(exact, group.size())
            dist.all_reduce(apart, group=group)
            if not_finite is not None:
                not_finite(~apart.isfinite().all())
        for beside in (reference, apart):
            if beside is not None:
                more = self.bytes_of_ring(group, beside.nbytes)
                sent, outside = sent + more[0], outside + more[1]
        exchange.average(group, task.exchange, few, self._scratch(values.device))
        if apart is not None:
            put_back(exact, apart)
        if reference is not None:
            error = relative_error(few.to(torch.float32), reference)
        self._counter.add(values.nbytes, group.size(), sent, outside, quantized=True, error=error)

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
        return self._task(plan, step, [owner], shards.device, not_finite, label)

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

    def _split(self, owners: Sequence[Owner]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return where the values are that are sent in few bits, and where those that are not."""
        spans: dict[bool, list[Span]] = {False: [], True: []}
        start = 0
        for owner in owners:
            stop = start + owner_length(owner)
            if start < stop:
                spans[self._is_exact(owner)].append(Span(start, stop))
            start = stop
        return tuple(spans[False]), tuple(spans[True])

    def _task(
        self,
        plan: Plan,
        step: Step,
        owners: Sequence[Owner],
        device: torch.device,
        not_finite: NotFinite | None,
        label: int,
    ) -> Task:
        slots: dict[str, Slot] = {name: Slot(spans) for name, spans in plan.slots.items()}
        residuals = self._feedback.residuals(step, owners, slots, device)
        return Task(plan, residuals.span, not_finite, label)


def is_sampled(number: int, every: int) -> bool:
    """Return whether a bucket is the one in ``every`` that is sampled, by its number; with 0 none is.

    The first one is; of the next so many buckets a random one, the same on all ranks: a fixed one could
    always be the same bucket of a backward pass.
    """
    if every == 0:
        return False
    turn, index = divmod(number, every)
    return index == (zlib.crc32(turn.to_bytes(8, "little")) % every if turn else 0)


def is_captured(device: torch.device) -> bool:
    """Return whether what runs on a device now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _set_apart(gradients: Sequence[torch.Tensor], world_size: int) -> torch.Tensor:
    """Return a rank's shares of the means of some gradients, for an all-reduce."""
    apart = torch.cat([gradient.flatten() for gradient in gradients])
    return apart.to(torch.promote_types(apart.dtype, torch.float32)).div_(world_size)


def relative_error(mean: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the distance of a mean from the exact one in L2, relative to its length. Overwrites both."""
    largest = exact.abs().amax()
    scale = torch.where(largest > 0, largest, 1.0)  # squares of very large or small numbers are out of range
    exact /= scale
    difference = mean.div_(scale).sub_(exact).norm()
    return torch.where(difference == 0, 0.0, difference / exact.norm())
