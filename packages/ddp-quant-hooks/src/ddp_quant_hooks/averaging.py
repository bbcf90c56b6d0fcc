"""Average values: decided on the caller's thread, done by a job on the state's worker.

Buckets of ``DistributedDataParallel``, plain tensors and the gradients of FSDP2 are averaged here.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange.exchange import NotFinite, Parts
from ddp_quant_hooks.exchange.placement import Placement, choose_placement
from ddp_quant_hooks.exchange.plan import Formats, Plan, Span
from ddp_quant_hooks.exchange.planner import plan_average
from ddp_quant_hooks.exchange.values import Scratch, Values, put_back
from ddp_quant_hooks.feedback.residuals import Owner, owner_length
from ddp_quant_hooks.feedback.step import Step, value_count
from ddp_quant_hooks.feedback.store import Feedback
from ddp_quant_hooks.kernels import VALUE_DTYPES, Layout
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.statistics import BucketCounter, bytes_around_ring
from dist_utils.process_groups import runs_on_host

_MOST_PLANS = 1 << 12
"""How many plans a state keeps: of calls whose tensors have another length in every step, not all of them."""


class Decided(NamedTuple):
    """What is decided about values once, for all steps.

    Attributes:
        plan: How they are averaged in few bits, or those of them that are not exact.
        few: Where these are, if some are exact; else ``None``.
        exact: The values that are averaged without compression.
    """

    plan: Any
    few: tuple[Span, ...] | None = None
    exact: tuple[Span, ...] = ()


class Prepared(NamedTuple):
    """What was decided on the caller's thread, for :meth:`Average.run`.

    Attributes:
        decided: For all steps.
        task: How values are averaged in few bits in this one.
        not_finite: Called with flags, whether a value of a mean is not finite; ``None`` if nobody asks.
        is_sampled: Whether the error is measured.
        in_parts: Whether :meth:`Average.run_in_parts` only sends messages, and calls no collectives.
    """

    decided: Decided
    task: Any
    not_finite: NotFinite | None
    is_sampled: bool
    in_parts: bool


class Average(ABC):
    """What a state does with values that all ranks average: by plans that know hosts.

    It knows no state: jobs keep it alive, and a state must not end on its own worker's thread.

    Args:
        options: The options of the state.
        feedback: What it keeps from step to step.
        counter: Counts what is averaged.
    """

    _pauses = False
    """Whether buckets wait so often that the next one should begin meanwhile."""

    skips_first_steps = False
    """Whether it averages as it goes on, where it would send the first steps in another way."""

    def __init__(self, options: Options, feedback: Feedback, counter: BucketCounter) -> None:
        self._options, self._feedback, self._counter = options, feedback, counter
        self._hosts: tuple[int, ...] | None = None
        self._links: Sequence[Mapping[str, str]] = ()
        self._logged_as: str | None = None
        self._placements: dict[str, Placement] = {}
        self._plans: dict[object, Plan] = {}
        self._scratches: dict[torch.device, list[Scratch]] = {}
        self._prepared = 0

    def start_over(self) -> None:
        """Free memory, forget where the ranks are, and sample the next bucket: ranks may agree again."""
        self._hosts = None
        self._prepared = 0
        self._placements.clear()
        self._plans.clear()
        self._scratches.clear()

    def learn_hosts(
        self, hosts: Sequence[int], links: Sequence[Mapping[str, str]], logged_as: str | None
    ) -> None:
        """Learn where the ranks are; they have agreed on it.

        Args:
            hosts: For each rank, the number of its host.
            links: For each rank and type of device, what
                :func:`ddp_quant_hooks.exchange.placement.link_inside_host` returned there.
            logged_as: The name of the state in the log; ``None``: another rank writes it.

        Raises:
            ValueError: Levels do not fit the ranks, or their hosts.
        """
        self.start_over()
        self._hosts, self._links, self._logged_as = tuple(hosts), links, logged_as
        # How many levels there can be depends on hosts alone, and not on the links inside them.
        placement = self._choose_placement(next(iter(links[0])), None)
        formats = Formats(*self._options.layouts(torch.float32), 4)
        plan_average(placement, 0, 1, formats, levels=self._options.levels)

    def quantizes(self, owners: Sequence[Owner], tensors: Sequence[torch.Tensor], ranks: int) -> bool:
        """Return whether values are averaged here, and not without compression; the same on all ranks.

        Neither small buckets are, nor exact values alone, nor fp64.

        Args:
            owners: The parameters or keys that the values belong to, in their order.
            tensors: The tensors that they are in, real or complex: one for each owner, or one for all.
            ranks: How many ranks average.

        Raises:
            ValueError: As :meth:`is_exact`.
        """
        if tensors[0].dtype.to_real() not in VALUE_DTYPES:
            return False
        if sum(tensor.nbytes for tensor in tensors) < self._options.least_bytes(ranks):
            return False
        return any(owner_length(owner) and not self.is_exact(owner) for owner in owners)

    @abstractmethod
    def is_exact(self, owner: Owner) -> bool:
        """Return whether the user wants an owner's values to be averaged without compression.

        Raises:
            ValueError: It is not known.
        """

    @abstractmethod
    def terms_of(self, owners: Sequence[Owner]) -> Mapping[str, object]:
        """Return what ranks must have alike in a call, besides lengths and dtypes, by name."""

    def decide(
        self, group: dist.ProcessGroup, owners: Sequence[Owner], tensors: Sequence[torch.Tensor]
    ) -> Decided | None:
        """Decide about values what stays as it is in every step, for :meth:`prepare`, alike on all ranks.

        Args:
            group: The process group whose ranks average.
            owners: As for :meth:`quantizes`.
            tensors: Likewise.

        Returns:
            ``None``: they are averaged without compression.
        """
        if any(tensor.is_sparse for tensor in tensors) or not self.quantizes(owners, tensors, group.size()):
            return None
        if not any(map(self.is_exact, owners)):
            return Decided(self._plan_of(group, owners, sum(map(value_count, tensors)), tensors[0]))
        few, exact = split_owners(owners, self.is_exact)
        plan = self._plan_of(group, self._not_exact(owners), sum(map(len, few)), tensors[0])
        return Decided(plan, few, exact)

    def prepare(
        self,
        step: Step,
        decided: Decided,
        owners: Sequence[Owner],
        tensors: Sequence[torch.Tensor],
        *,
        label: int = 0,
    ) -> Prepared:
        """Decide how values are averaged, and return that for :meth:`run`.

        On the caller's thread, in the same order on all ranks.

        Args:
            step: The step that they belong to.
            decided: What :meth:`decide` has returned for them.
            owners: As for :meth:`quantizes`.
            tensors: Likewise. Their values are not read yet.
            label: See :class:`ddp_quant_hooks.exchange.exchange.Task`.

        Raises:
            ValueError: An option does not fit the ranks, or their hosts; on all of them.
        """
        label ^= self._prepared << 32  # messages of several buckets are on their way at the same time
        not_finite = step.outcome.not_finite if self._feedback.wanted else None
        owners = owners if decided.few is None else self._not_exact(owners)
        task = self._task_of(step, decided.plan, owners, tensors[0].device, not_finite, label)
        sampled = is_sampled(self._prepared, self._options.sample_every)
        self._prepared += 1
        in_parts = self._pauses and not (sampled or decided.exact)
        return Prepared(decided, task, not_finite, sampled, in_parts)

    def run(self, group: dist.ProcessGroup, values: Values, prepared: Prepared) -> None:
        """Average values in place, the same bits on all ranks, and count them. A job.

        Args:
            group: The process group whose ranks average.
            values: All values.
            prepared: What :meth:`prepare` has returned.
        """
        for _ in self.run_in_parts(group, values, prepared):
            pass

    def run_in_parts(self, group: dist.ProcessGroup, values: Values, prepared: Prepared) -> Parts[None]:
        """Do as :meth:`run`, and pause where nothing is left to do but to wait for other ranks.

        For :meth:`dist_utils.OrderedWorker.submit_in_parts`, if :attr:`Prepared.in_parts` allows that.
        """
        reference, error, few, without_compression = None, None, values, 0
        if prepared.is_sampled:
            reference = values.to(torch.float32).div_(group.size())
            dist.all_reduce(reference, group=group)
            without_compression += reference.nbytes
        if prepared.decided.few is not None:
            exact = values.parts_of(prepared.decided.exact)
            without_compression += self._average_exact(group, exact, prepared.not_finite)
            few = Values(values.parts_of(prepared.decided.few))
        sent, outside = yield from self._average(group, few, prepared.task)
        if without_compression:
            more = self.bytes_of_ring(group, without_compression)
            sent, outside = sent + more[0], outside + more[1]
        if reference is not None:
            error = relative_error(values.to(torch.float32), reference)
        self._counter.add(values.nbytes, group.size(), sent, outside, quantized=True, error=error)

    def _average_exact(
        self, group: dist.ProcessGroup, exact: Sequence[torch.Tensor], not_finite: NotFinite | None
    ) -> int:
        """Average values without compression, in fp32 and in place; return how many bytes they have there."""
        mean = Values(exact).to(torch.float32).div_(group.size())
        dist.all_reduce(mean, group=group)
        if not_finite is not None:
            not_finite(~mean.isfinite().all())
        put_back(exact, mean)
        return mean.nbytes

    def _not_exact(self, owners: Sequence[Owner]) -> list[Owner]:
        return [owner for owner in owners if not self.is_exact(owner)]

    @abstractmethod
    def _plan_of(
        self, group: dist.ProcessGroup, owners: Sequence[Owner], count: int, like: torch.Tensor
    ) -> Any:
        """Return what is decided about values that are sent in few bits; see :meth:`decide`.

        Args:
            group: As for :meth:`decide`.
            owners: Those of these values.
            count: Their number.
            like: A tensor of their dtype and device.
        """

    @abstractmethod
    def _task_of(
        self,
        step: Step,
        plan: Any,
        owners: Sequence[Owner],
        device: torch.device,
        not_finite: NotFinite | None,
        label: int,
    ) -> Any:
        """Decide how values are sent in few bits in a step; see :meth:`prepare`."""

    @abstractmethod
    def _average(self, group: dist.ProcessGroup, values: Values, task: Any) -> Parts[tuple[int, int]]:
        """Average values in few bits, in place; return the bytes sent, and those of them to other hosts.

        See :meth:`run_in_parts`.
        """

    @abstractmethod
    def refuse_flat(self, name: str) -> None:
        """Raise ``ValueError`` if values need the shapes of tensors, which FSDP's flat gradients do not have.

        Args:
            name: What hands over flat values, for the error.
        """

    @abstractmethod
    def refuse_shards(self, name: str) -> None:
        """Raise ``ValueError`` unless it averages shards: only values in few bits can be, without levels.

        Args:
            name: Of the function that wants it, for the error.
        """

    def bytes_of_ring(self, group: dist.ProcessGroup, nbytes: int) -> tuple[int, int]:
        """Return the bytes that a rank sends in a ring all-reduce, and those of them to another host."""
        hosts = (0,) * group.size() if self._hosts is None else self._hosts
        return bytes_around_ring(nbytes, range(group.size()), hosts, group.rank())

    def count_plain(self, group: dist.ProcessGroup, nbytes: int) -> None:
        """Count what was averaged without compression."""
        self._counter.add(nbytes, group.size(), *self.bytes_of_ring(group, nbytes), quantized=False)

    def _plan(
        self,
        plan: Callable[..., Plan],
        group: dist.ProcessGroup,
        count: int,
        like: torch.Tensor,
        layouts: tuple[Layout, Layout] | None = None,
        **options: Any,
    ) -> Plan:
        """Return a plan for the ranks as they are, by one of the planner's functions; made once."""
        key = plan, count, like.dtype, like.device.type, layouts
        found = self._plans.get(key)
        if found is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            dtype = like.dtype.to_real()
            formats = Formats(*(layouts or self._options.layouts(dtype)), dtype.itemsize)
            on_streams = not runs_on_host(group, like.device)
            placement = self._placement(like.device.type)
            found = plan(placement, group.rank(), count, formats, on_streams=on_streams, **options)
            self._plans[key] = found
        return found

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


def relative_error(mean: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the distance of a mean from the exact one in L2, relative to its length. Overwrites both."""
    largest = exact.abs().amax()
    scale = torch.where(largest > 0, largest, 1.0)  # squares of very large or small numbers are out of range
    exact /= scale
    difference = mean.div_(scale).sub_(exact).norm()
    return torch.where(difference == 0, 0.0, difference / exact.norm())


def split_owners(
    owners: Sequence[Owner], is_exact: Callable[[Owner], bool]
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return where the values are that are sent in few bits, and where those that are not."""
    spans: dict[bool, list[Span]] = {False: [], True: []}
    start = 0
    for owner in owners:
        stop = start + owner_length(owner)
        if start < stop:
            spans[is_exact(owner)].append(Span(start, stop))
        start = stop
    return tuple(spans[False]), tuple(spans[True])
