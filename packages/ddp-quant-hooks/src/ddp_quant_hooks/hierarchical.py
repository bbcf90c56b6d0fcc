"""Full precision inside a node, few bits between nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.chunks import Span, shards
from ddp_quant_hooks.exchanges import Exchange, average_inside, average_quantised, take_turns
from ddp_quant_hooks.link import Link
from ddp_quant_hooks.scratch import Scratch
from ddp_quant_hooks.state import QuantizedAllreduceState, Task
from dist_utils import GroupLike, resolve_group
from dist_utils.torch_compat import all_gather_single

__all__ = ["HierarchicalAllreduceState"]


class HierarchicalAllreduceState(QuantizedAllreduceState):
    """A state whose ranks form a grid of nodes, with a slow link between nodes and a fast one inside.

    Every rank sums one shard of a bucket for its node, in full precision; the ranks that own the same
    shard average it across nodes as :class:`QuantizedAllreduceState` does; then each hands it to its node.
    Between nodes that sends 1 / L of the bytes per rank, with L ranks in a node, and rounds once per
    node instead of once per rank.

    Args:
        process_group: All ranks of the grid; what DDP uses. ``None`` is WORLD.
        intra_group: This rank's node: a process group. With ``inter_group``; not with ``mesh``.
        inter_group: The ranks that have this rank's place on the other nodes.
        mesh: Instead of both: a two-dimensional ``DeviceMesh``, nodes first, as for hybrid sharding.
        **options: As :class:`QuantizedAllreduceState`. Statistics count what is sent inside nodes, too.

    Raises:
        TypeError, ValueError: As :class:`QuantizedAllreduceState`; or the groups are no grid of
            ``process_group``. What only all ranks together can see raises in the first ``backward()``.

    Does not pickle: its groups belong to this job.

    Example:
        >>> mesh = init_device_mesh("cuda", (nodes, 8))  # doctest: +SKIP
        >>> state = HierarchicalAllreduceState(mesh=mesh)  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    _OWN_IN_BUCKETS = True  # of shards, which a node's ranks share out

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        intra_group: GroupLike = None,
        inter_group: GroupLike = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        super().__init__(process_group, **options)
        if mesh is not None:
            if intra_group is not None or inter_group is not None:
                raise ValueError("give either mesh, or intra_group and inter_group")
            if mesh.ndim != 2:
                raise ValueError(f"mesh must have two dimensions, nodes and ranks in a node, got {mesh.ndim}")
            inter_group, intra_group = mesh.get_group(0), mesh.get_group(1)
        if intra_group is None or inter_group is None:
            raise ValueError("a hierarchical state needs intra_group and inter_group, or mesh")
        everyone = dist.get_process_group_ranks(self.process_group)
        inside, across = (
            dist.get_process_group_ranks(resolve_group(group)) for group in (intra_group, inter_group)
        )
        _check_grid(everyone, inside, across)
        self._inside = [everyone.index(rank) for rank in inside]
        self._across = [everyone.index(rank) for rank in across]
        # Not the group itself: its owner ends it by letting go of it.
        self._agreed_on: weakref.ref[dist.ProcessGroup] | None = None

    def _exchange(self, group: dist.ProcessGroup, values: torch.Tensor, task: Task) -> int:
        if self._agreed_on is None or self._agreed_on() is not group:
            self._require_grid(group, values.device)
            self._agreed_on = weakref.ref(group)
        inside, across = Link(group, self._inside, 0), Link(group, self._across, 1)
        wire = self._wire(across, task)
        block_size = self.scatter.block_size

        def exchanges() -> Iterator[Callable[[Scratch], Exchange]]:
            own_start = shard_start = 0
            for index, chunk in enumerate(self._chunks(values.numel(), values.device)):
                own = shards(chunk, inside.size, block_size)[inside.index]
                yield partial(
                    average_inside,
                    values=values[chunk.start : chunk.stop],
                    link=inside,
                    index=index,
                    block_size=block_size,
                    failed=wire.failed,
                    between=_nothing
                    if across.size == 1
                    else partial(
                        average_quantised,
                        wire=wire,
                        index=index,
                        own_start=own_start,
                        shard_start=shard_start,
                    ),
                )
                own_start += len(own)
                shard_start += len(shards(Span(0, len(own)), across.size, block_size)[across.index])

        take_turns(exchanges(), self._scratch(values.device), values.device)
        return inside.bytes_sent + across.bytes_sent

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "intra_group": self._inside, "inter_group": self._across}

    def _terms(self) -> dict[str, object]:
        grid = f"{len(self._across)} nodes of {len(self._inside)} ranks"
        return {**super()._terms(), "hierarchy": grid}

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a HierarchicalAllreduceState does not pickle: its groups belong to this job")

    def _spans(self, count: int, device: torch.device) -> tuple[list[Span], list[Span]]:
        block_size, me = self.scatter.block_size, self.process_group.rank()
        place, nodes, node = self._inside.index(me), len(self._across), self._across.index(me)
        chunks = self._chunks(count, device)
        own = [shards(chunk, len(self._inside), block_size)[place] for chunk in chunks]
        if nodes <= 2:
            return own, []
        return own, [shards(part, nodes, block_size)[node] for part in own]

    def _use_group_of(self, ddp: DistributedDataParallel) -> None:
        if self._group is None:
            self._group = self.process_group  # the grid was made of it
        super()._use_group_of(ddp)

    def _require_grid(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Raise on every rank unless all ranks' groups make one grid; one small all-gather."""
        row = [len(self._inside), *self._inside, *self._across]
        mine = torch.tensor(row + [-1] * (2 * group.size() + 1 - len(row)), device=device)
        table = mine.new_empty(group.size() * mine.numel())
        all_gather_single(table, mine, group)
        rows = [[number for number in row if number >= 0] for row in table.view(group.size(), -1).tolist()]
        for rank, (size, *ranks) in enumerate(rows):
            inside, across = ranks[:size], ranks[size:]
            same_node = all(rows[peer][1 : rows[peer][0] + 1] == inside for peer in inside)
            same_place = all(
                rows[peer][rows[peer][0] + 1 :] == across
                and rows[peer][1 : rows[peer][0] + 1].index(peer) == inside.index(rank)
                for peer in across
            )
            if not (same_node and same_place):
                raise ValueError(
                    f"the groups are no grid: rank {rank} of the process group has intra_group {inside} and "
                    f"inter_group {across}, which its peers see differently"
                )


def _check_grid(everyone: list[int], inside: list[int], across: list[int]) -> None:
    for name, ranks in (("intra_group", inside), ("inter_group", across)):
        if not set(ranks) <= set(everyone):
            raise ValueError(f"{name} has ranks {ranks}, not all of them in process_group {everyone}")
    shared = set(inside) & set(across)
    if shared != {dist.get_rank()} or len(inside) * len(across) != len(everyone):
        raise ValueError(
            f"intra_group {inside} and inter_group {across} do not make a grid of the {len(everyone)} ranks "
            f"of process_group: they must share rank {dist.get_rank()} alone, and their sizes must "
            "multiply to all"
        )


def _nothing(_: Scratch, *, values: torch.Tensor) -> Exchange:
    del values  # they are the mean already
    yield from ()
