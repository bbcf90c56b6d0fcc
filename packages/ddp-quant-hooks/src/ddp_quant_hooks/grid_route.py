"""Averages in a grid of nodes: in full precision inside a node, in few bits between nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks.chunks import Span, shards
from ddp_quant_hooks.exchanges import Exchange, Wire, average_inside, average_quantized
from ddp_quant_hooks.link import Link, Transport
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.plans import Levels, chunk_values, plan_levels
from ddp_quant_hooks.residuals import BucketResiduals
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.scratch import Scratch
from ddp_quant_hooks.values import Values
from dist_utils.torch_compat import all_gather_single

__all__ = ["GridRoute"]


class GridRoute(Route):
    """Every rank exchanges with its node, and its shard with the ranks in its place on other nodes.

    Args:
        options: The options of the state.
        inside: The ranks of this rank's node, in the group of all.
        across: The ranks with its place on the nodes, likewise.
        transport: As for :class:`Route`.
    """

    own_in_buckets = True  # own residuals are those of a rank's shards inside its node

    def __init__(
        self,
        options: Options,
        inside: Sequence[int],
        across: Sequence[int],
        transport: Transport | None = None,
    ) -> None:
        super().__init__(options, transport)
        self._inside, self._across = list(inside), list(across)
        # Not the group itself: its owner ends it by dropping the last reference.
        self._agreed_on: weakref.ref[dist.ProcessGroup] | None = None

    def average(
        self,
        group: dist.ProcessGroup,
        values: Values,
        kept: BucketResiduals,
        failed: Callable[[torch.Tensor], None] | None,
        label: int = 0,
    ) -> int:
        """Like :meth:`Route.average`; the first time in a group, its ranks check that they are a grid."""
        if self._agreed_on is None or self._agreed_on() is not group:
            self._require_grid(group, values.device)
            self._agreed_on = weakref.ref(group)
        inside = Link(group, self._inside, label=label, transport=self._transport)
        rows = self.levels(group, values.count).rows(self._across.index(group.rank()))
        across = [
            Link(group, [self._across[node] for node in row], 1, label=label, transport=self._transport)
            for row in rows
        ]
        wire = Wire(across, self.scatter, self.gather, kept.own, kept.shard, failed)
        self._take_turns(self._exchanges_in_grid(group, values, inside, wire), values.device)
        return inside.bytes_sent + wire.bytes_sent

    def levels(self, group: dist.ProcessGroup, count: int) -> Levels:  # noqa: ARG002 - the nodes are known
        """Like :meth:`Route.levels`, of nodes."""
        return self._chosen or plan_levels(len(self._across), -(-count // len(self._inside)))

    def ranks_per_host(self, group: dist.ProcessGroup) -> int:  # noqa: ARG002
        """Like :meth:`Route.ranks_per_host`: the user has given the nodes."""
        return 1

    def require_fit(self, group: dist.ProcessGroup) -> None:  # noqa: ARG002
        """Like :meth:`Route.require_fit`, of nodes."""
        self._require_product(len(self._across), "nodes")

    def spans(
        self, group: dist.ProcessGroup, count: int, device: torch.device
    ) -> tuple[list[Span], list[Span]]:
        """Like :meth:`Route.spans`."""
        me, levels = group.rank(), self.levels(group, count)
        place, node = self._inside.index(me), self._across.index(me)
        chunks = self._chunks(group, count, device)
        own = [shards(chunk, len(self._inside), self.scatter.block_size)[place] for chunk in chunks]
        return own, self._shards(own, levels, node)

    def _exchanges_in_grid(
        self, group: dist.ProcessGroup, values: Values, inside: Link, wire: Wire
    ) -> Iterator[Callable[[Scratch], Exchange]]:
        block_size, levels = self.scatter.block_size, self.levels(group, values.count)
        node, own_start, shard_start = self._across.index(group.rank()), 0, 0
        for index, chunk in enumerate(self._chunks(group, values.count, values.device)):
            own = shards(chunk, inside.size, block_size)[inside.index]
            exchange = partial(
                average_inside,
                link=inside,
                index=index,
                block_size=block_size,
                failed=wire.failed,
                between=_nothing
                if levels.ranks == 1
                else partial(
                    average_quantized,
                    wire=wire,
                    index=index,
                    own_start=own_start,
                    shard_start=shard_start,
                ),
            )
            yield values.exchanged(chunk, exchange)
            own_start += len(own)
            shard_start += sum(map(len, self._shards([own], levels, node)))

    def _chunk_values(self, group: dist.ProcessGroup, count: int, device: torch.device) -> int:
        on_streams, others = not self._transport.on_host(group, device), len(self._inside) - 1
        return chunk_values(self.levels(group, count), on_streams=on_streams, others=others)

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
                    f"the groups are not a grid: rank {rank} of the process group has intra_group {inside} "
                    f"and inter_group {across}, which its peers see differently"
                )


def _nothing(_: Scratch, *, values: torch.Tensor) -> Exchange:
    del values  # they are the mean already
    yield from ()
