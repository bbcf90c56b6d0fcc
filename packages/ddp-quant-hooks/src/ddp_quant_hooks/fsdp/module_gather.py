"""The gather of one module: shards become messages, these go round, and all ranks restore all shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.fsdp.differences import Differences, note_bytes
from ddp_quant_hooks.fsdp.gather_plan import (
    ShardFormat,
    message_tags,
    pause_before,
    plan_route,
    shard_format,
)
from ddp_quant_hooks.fsdp.gather_statistics import GatherCounter
from ddp_quant_hooks.fsdp.kept import ForwardPasses, KeptMemory
from ddp_quant_hooks.fsdp.replacement import Substitute
from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.kernels import VALUE_DTYPES, Layout
from ddp_quant_hooks.statistics import bytes_around_ring
from ddp_quant_hooks.tensors.calls import outside_graphs
from dist_utils import OrderedWorker, start_messages
from dist_utils.process_groups import Arrival, record_use, runs_on_host
from dist_utils.torch_compat import all_gather_single, private, profiler_range

_log = logging.getLogger(__name__)


class GatherOptions(NamedTuple):
    """How modules are gathered, the same way on all ranks; see ``quantize_all_gather``."""

    block_size: int
    rotate: bool
    exact_1d: bool
    min_bytes: int
    intra_node: Literal["auto", "quantized", "flat"]
    keep_for_backward: bool
    differences: bool

    @property
    def layout(self) -> Layout:
        """The format of what is sent in few bits: of values, or of differences."""
        return Layout("int4" if self.differences else "int8", self.block_size, self.rotate)


class ModuleGather(Substitute):
    """What gathers one module's parameters, as ``FSDPModule.set_custom_all_gather`` takes it.

    Args:
        module: The module.
        options: How it is gathered.
        agreement: Of the ranks that it is sharded over, which knows their hosts.
        counter: Counts what is gathered.
        before: Called before every gather.
        forwards: The forward passes that are running.

    Attributes:
        name: The name of the module.
    """

    def __init__(
        self,
        module: ShardedModule,
        options: GatherOptions,
        agreement: OrderedWorker,
        counter: GatherCounter,
        before: Callable[[], None],
        forwards: ForwardPasses,
    ) -> None:
        self._module, self._options, self._counter = module, options, counter
        self._before, self._forwards = before, forwards
        self._hosts = hosts = tuple(agreement.hosts())
        self._group: dist.ProcessGroup = module.group.mesh_info.shard_process_group
        me, flat = self._group.rank(), options.intra_node == "flat"
        if options.differences and len(set(hosts)) == 1:
            flat = True  # inside a host copies go round in full precision, which would save nothing
        self._route = plan_route(tuple(range(len(hosts))) if flat else hosts, me)
        self._is_direct = flat or len(set(hosts)) in (1, len(hosts))
        self._sent_to_other_hosts = sum(hosts[peer] != hosts[me] for peer in self._route.sends)
        self.name = module.name
        use = agreement.agree()
        self._from_the_owner, self._handed_on = message_tags(use, self.name, "a shard", "handed on")
        self._differences: Differences | None = None
        if options.differences:
            self._differences = Differences(self.name, self._group, self._route, use)
        self._kept: KeptMemory | None = None
        self._logged: set[str] = set()

    @outside_graphs
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather the shards of all ranks; with ``async_op`` return what restores them when it is waited for.

        Args:
            output_tensor: The output: the shards of all ranks, flat, one after another.
            input_tensor: This rank's, which is a part of ``output_tensor``.
            group: The ranks that gather.
            async_op: Do not wait.
        """
        self._before()
        with profiler_range("ddp_quant_hooks.quantize_all_gather"):
            parameters = self.parameters()
            plain = self.why_plain(parameters, group, input_tensor.dtype, output_tensor.nbytes)
            if plain:
                self.drop_kept()
                return self._gather_plain(plain, output_tensor, input_tensor, group, async_op=async_op)
            note = 0 if self._differences is None else note_bytes(len(parameters))
            form = shard_format(parameters, self._options.layout, input_tensor.itemsize, note)
            again = self._gathers_again()
            if self._kept is not None and again:
                self._restore_kept(form, output_tensor)
                return None
            if self._differences is not None:
                gathering = self._gather_differences(
                    self._differences, form, output_tensor, input_tensor, again=again
                )
            else:
                gathering = self._gather(form, output_tensor, input_tensor)
            if async_op:
                next(gathering)
                return _Gathering(gathering, output_tensor)
            for _ in gathering:
                pass  # it waits when it is resumed
            return None

    def parameters(self) -> tuple[tuple[int, bool], ...]:
        """Return how many values of each parameter a shard has, and whether they are sent as they are."""
        return tuple(
            (one.padded_sharded_param_size.numel(), self._options.exact_1d and one.sharded_param.dim() <= 1)
            for one in self._module.group.fsdp_params
        )

    def why_plain(
        self,
        parameters: tuple[tuple[int, bool], ...],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        nbytes: int,
    ) -> str:
        """Return why values are gathered in full precision, or nothing if they are not.

        Args:
            parameters: What a shard has.
            group: The ranks that gather.
            dtype: Of the values; bytes if parameters have several.
            nbytes: Of all shards.
        """
        if self._group.size() == 1:
            return "one rank alone has its shards"
        if group is not self._group:
            return "its values were rounded in the forward pass, and are gathered among fewer ranks"
        if dtype not in VALUE_DTYPES:
            several = dtype == torch.uint8
            return "its parameters are of several dtypes" if several else f"its parameters are of {dtype}"
        if all(exact for _, exact in parameters):
            return "all of its parameters have one dimension"
        if nbytes < self._options.min_bytes:
            return f"it has {nbytes} bytes, and min_bytes is {self._options.min_bytes}"
        return ""

    def why_always_plain(self) -> str:
        """Return why the module will be gathered in full precision, as far as that is known now."""
        dtypes = {*self._module.gathered_dtypes}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        parameters = self.parameters()
        nbytes = self._group.size() * sum(length for length, _ in parameters) * dtype.itemsize
        return self.why_plain(parameters, self._group, dtype, nbytes)

    @torch.no_grad()
    def squares(self) -> tuple[float, float]:
        """Return the sums of squares of what rounding changes this rank's shard by, and of the shard.

        With differences: of what it lacks in its copy.
        """
        exact = torch.cat([*map(torch.Tensor.to, self._shards(), self._module.gathered_dtypes)])
        exact = exact.to(self._module.group.device)  # offloaded shards are on the CPU
        if self._differences is not None:
            copy = self._differences.own_copy(exact)
            return _squares(exact if copy is None else copy, exact)
        form = shard_format(self.parameters(), self._options.layout, exact.itemsize)
        message = torch.empty(form.message_bytes, dtype=torch.uint8, device=exact.device)
        form.encode(exact, message)
        rounded = torch.empty_like(exact)
        form.decode(message, (0,), rounded)
        return _squares(rounded, exact)

    def start_over(self) -> None:
        """Free what was received, and send values next, where differences would be sent."""
        self.drop_kept()
        if self._differences is not None:
            self._differences.start_over()

    def drop_kept(self) -> None:
        """Free the messages of a forward pass."""
        self._kept = None

    def _gather(self, form: ShardFormat, output: torch.Tensor, own: torch.Tensor) -> Iterator[None]:
        """Gather in few bits; pause before each wait."""
        self.drop_kept()
        keeps = self._keeps()  # asked now: an asynchronous gather goes on at another place
        group, route, size = self._group, self._route, form.message_bytes
        memory = torch.empty(len(route.order) * size, dtype=torch.uint8, device=output.device)
        rows = memory.view(len(route.order), size)
        # All of it before anything is restored: this rank's values are a part of the output.
        form.encode(own, rows[route.order.index(group.rank())])
        for works in self._steps(rows):
            yield from pause_before(works)
        record_use(memory)  # an asynchronous gather may end on another stream
        form.decode(memory, route.order, output)
        if keeps:
            self._kept = KeptMemory(memory)
            self._kept.end_use()
        sent, outside = route.messages_sent * size, self._sent_to_other_hosts * size
        if self._uses_collective(memory.device):
            sent, outside = self._bytes_of_ring(group, memory.nbytes)
        self._counter.add(
            quantized_gathers=1,
            bytes_sent=sent,
            bytes_between_hosts=outside,
            bytes_of_all_gather=self._bytes_of_ring(group, output.nbytes)[0],
        )

    def _gather_differences(
        self,
        differences: Differences,
        form: ShardFormat,
        output: torch.Tensor,
        own: torch.Tensor,
        *,
        again: bool,
    ) -> Iterator[None]:
        """Gather differences, or what was gathered last ``again``; pause before each wait."""
        sent = yield from differences.gather(form, output, own, again=again)
        route, kind = self._route, "reused" if sent.bytes_to_receiver == 0 else "quantized"
        self._counter.add(
            **{f"{'exact' if sent.has_values else kind}_gathers": 1},
            bytes_sent=len(route.leaving) * sent.bytes_to_receiver + len(route.inside) * sent.bytes_inside,
            bytes_between_hosts=self._sent_to_other_hosts * sent.bytes_to_receiver,
            bytes_of_all_gather=self._bytes_of_ring(self._group, output.nbytes)[0],
        )

    def _steps(self, rows: torch.Tensor) -> Iterator[Sequence[Arrival]]:
        """Start the messages of each step, when those of the step before have arrived; one is a row."""
        group, route = self._group, self._route
        place = dict(zip(route.order, rows, strict=True))
        mine = place[group.rank()]
        if self._uses_collective(rows.device):
            yield [all_gather_single(rows.view(-1), mine, group=group, async_op=True)]
            return
        receives = [(rank, place[rank]) for rank in route.receives]
        sends = [(rank, mine) for rank in route.sends]
        yield start_messages(group, receives=receives, sends=sends, tag=self._from_the_owner)
        receives = [(rank, rows[span.start : span.stop]) for rank, span in route.handed_on]
        sends = [(rank, rows[route.hands_on.start : route.hands_on.stop]) for rank in route.inside]
        yield start_messages(group, receives=receives, sends=sends, tag=self._handed_on)

    def _uses_collective(self, device: torch.device) -> bool:
        """Return whether a collective gathers messages, as FSDP's own: it knows best how GPUs are joined."""
        return self._is_direct and not runs_on_host(self._group, device)

    def _gathers_again(self) -> bool:
        """Return whether the module's own backward pass needs what its forward pass has gathered.

        A forward pass or ``unshard()`` inside of another backward pass may find changed shards; those that
        have not changed keep their bits. FSDP knows which of them gathers, alike on all ranks.
        """
        state = private(self._module.group, "_training_state", "telling passes apart")
        return bool(state.name == "PRE_BACKWARD")

    def _shards(self) -> list[torch.Tensor]:
        """Return this rank's shard of each parameter, padded and flat."""
        every = self._module.group.fsdp_params
        return [private(one, "_sharded_param_data", "the values of a shard") for one in every]

    def _keeps(self) -> bool:
        """Return whether the backward pass of the module will gather what it is gathering now."""
        sharded_as = self._module.group.mesh_info
        return (
            self._options.keep_for_backward
            and self._module.group.post_forward_mesh_info is sharded_as
            and self._module.group.unshard_in_backward
            and self._forwards.recorded
        )

    def _restore_kept(self, form: ShardFormat, output: torch.Tensor) -> None:
        assert self._kept is not None
        self._kept.begin_use()
        form.decode(self._kept.tensor, self._route.order, output)
        self.drop_kept()
        native, _ = self._bytes_of_ring(self._group, output.nbytes)
        self._counter.add(reused_gathers=1, bytes_of_all_gather=native)

    def _gather_plain(
        self, why: str, output: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool
    ) -> dist.Work | None:
        if why not in self._logged and self._group.rank() == 0:
            self._logged.add(why)
            _log.info("module %r is gathered in full precision: %s", self.name, why)
        work: dist.Work | None = all_gather_single(output, own, group=group, async_op=async_op)
        sent, outside = self._bytes_of_ring(group, output.nbytes)
        self._counter.add(
            plain_gathers=1, bytes_sent=sent, bytes_between_hosts=outside, bytes_of_all_gather=sent
        )
        return work

    def _bytes_of_ring(self, group: dist.ProcessGroup, nbytes: int) -> tuple[int, int]:
        """Return how many bytes this rank sends in FSDP's own gather, and how many to another host."""
        hosts: Sequence[int] = self._hosts
        if group is not self._group:
            everyone = dist.get_process_group_ranks(self._group)
            hosts = [hosts[everyone.index(rank)] for rank in dist.get_process_group_ranks(group)]
        # Half: a ring all-reduce sends all values twice.
        return bytes_around_ring(nbytes // 2, range(group.size()), hosts, group.rank())


def _squares(rounded: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Return the sums of squares of the error, and of the exact values."""
    error = rounded.double() - exact.double()
    return float(error.square().sum()), float(exact.double().square().sum())


class _Gathering(dist.Work):
    """A gather that ends when it is waited for.

    Args:
        rest: What is left of it.
        output: What it writes.
    """

    def __init__(self, rest: Iterator[None], output: torch.Tensor) -> None:
        super().__init__()
        self._rest, self._output = rest, KeptMemory(output)
        self._output.end_use()

    def wait(self, timeout: timedelta = timedelta()) -> bool:  # noqa: ARG002 - the group's own timeout counts
        """Wait for the messages, and restore all shards.

        FSDP waits again after an error. It gets NaN then, as ``reset_iter_state()`` must not raise.
        """
        self._output.begin_use()
        try:
            for _ in self._rest:
                pass
        except BaseException:
            self._output.tensor.fill_(torch.nan)
            raise
        return True
