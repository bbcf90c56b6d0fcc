"""How the values of a bucket get from rank to rank and back: in chunks, one after another on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks import hosts
from ddp_quant_hooks.chunks import Span, cut
from ddp_quant_hooks.exchanges import Exchange, Wire, average_quantized, take_turns
from ddp_quant_hooks.link import Link, Transport
from ddp_quant_hooks.options import Options
from ddp_quant_hooks.plans import Levels, chunk_values, depends_on_hosts, plan_levels
from ddp_quant_hooks.residuals import BucketResiduals, Residual
from ddp_quant_hooks.scratch import Scratch
from ddp_quant_hooks.shard_exchanges import gather_chunk, reduce_scatter_chunk
from ddp_quant_hooks.values import Values

__all__ = ["Route"]


class Route:
    """Every rank of a group sends to every other one; in a large group, in levels.

    Args:
        options: The options of the state.
        transport: Carries the messages; ``None``: the process group.
    """

    own_in_buckets = False
    """Whether a rank's own residuals belong to buckets instead of parameters."""

    def __init__(self, options: Options, transport: Transport | None = None) -> None:
        self.scatter, self.gather = options.scatter_layout, options.gather_layout
        self._transport = transport or Transport()
        self._chosen = None if options.levels is None else Levels(options.levels)
        self._scratches: dict[torch.device, list[Scratch]] = {}

    def average(
        self,
        group: dist.ProcessGroup,
        values: Values,
        kept: BucketResiduals,
        failed: Callable[[torch.Tensor], None] | None,
        label: int = 0,
    ) -> int:
        """Average ``values`` in place, the same bits on all ranks, and return how many bytes were sent.

        Args:
            group: The process group whose ranks average.
            values: All of a bucket.
            kept: The residuals of the bucket, which are added and updated.
            failed: As in :class:`~ddp_quant_hooks.exchanges.Wire`.
            label: Distinguishes messages of different buckets, if the backend supports that.
        """
        levels = self.levels(group, values.count)
        rows = levels.rows(group.rank())
        links = [Link(group, row, label=label, transport=self._transport) for row in rows]
        wire = Wire(links, self.scatter, self.gather, kept.own, kept.shard, failed)
        self._take_turns(self._exchanges(group, values, wire), values.device)
        return wire.bytes_sent

    def reduce_scatter(
        self,
        group: dist.ProcessGroup,
        shards_of_all: torch.Tensor,
        mean: torch.Tensor,
        own: Residual,
        failed: Callable[[torch.Tensor], None] | None,
        label: int = 0,
    ) -> int:
        """Average every rank's shard on that rank, and return how many bytes were sent.

        Args:
            group: The process group whose ranks average.
            shards_of_all: This rank's values for all shards, flat, one shard of equal length after another.
            mean: The output for the mean of this rank's shard; flat.
            own: The residual of this rank's values, which is added and updated.
            failed: As for :meth:`average`.
            label: As for :meth:`average`.
        """
        link = Link(group, range(group.size()), label=label, transport=self._transport)
        wire = Wire([link], self.scatter, self.gather, own, Residual(), failed)
        length = mean.numel()
        rows = shards_of_all.view(link.size, length)

        def exchange(index: int, chunk: Span) -> Callable[[Scratch], Exchange]:
            return partial(
                reduce_scatter_chunk,
                parts=list(rows[:, chunk.start : chunk.stop]),
                own_starts=[row * length + chunk.start for row in range(link.size)],
                mean=mean[chunk.start : chunk.stop],
                wire=wire,
                index=index,
            )

        self._exchange_shards(group, mean, exchange)
        return link.bytes_sent

    def all_gather(
        self, group: dist.ProcessGroup, mine: torch.Tensor, values_of_all: torch.Tensor, label: int = 0
    ) -> int:
        """Give every rank the values of all ranks, and return how many bytes were sent.

        Args:
            group: The process group whose ranks gather.
            mine: This rank's values, flat.
            values_of_all: The output for all values, flat, in rank order; bitwise identical on all ranks.
            label: As for :meth:`average`.
        """
        link = Link(group, range(group.size()), label=label, transport=self._transport)
        rows = values_of_all.view(link.size, mine.numel())

        def exchange(index: int, chunk: Span) -> Callable[[Scratch], Exchange]:
            return partial(
                gather_chunk,
                mine=mine[chunk.start : chunk.stop],
                parts=list(rows[:, chunk.start : chunk.stop]),
                layout=self.gather,
                link=link,
                index=index,
            )

        self._exchange_shards(group, mine, exchange)
        return link.bytes_sent

    def levels(self, group: dist.ProcessGroup, count: int) -> Levels:
        """Return the levels in which a bucket of ``count`` values is averaged."""
        if self._chosen is not None:
            return self._chosen
        return plan_levels(group.size(), count, self.ranks_per_host(group))

    def ranks_per_host(self, group: dist.ProcessGroup) -> int:
        """Return how many consecutive ranks are on a host, if that is known and matters."""
        if self._chosen is not None or not depends_on_hosts(group.size()):
            return 1
        return hosts.ranks_per_host(group.size())

    def require_fit(self, group: dist.ProcessGroup) -> None:
        """Raise ``ValueError`` unless the levels that were chosen are of this group's ranks."""
        self._require_product(group.size(), "ranks of the process group")

    def spans(
        self, group: dist.ProcessGroup, count: int, device: torch.device
    ) -> tuple[list[Span], list[Span]]:
        """Return which of a bucket's ``count`` values this rank's residuals cover, own and of shards."""
        own, levels = [Span(0, count)], self.levels(group, count)
        return own, self._shards(self._chunks(group, count, device), levels, group.rank())

    def lengths(self, group: dist.ProcessGroup, count: int, device: torch.device) -> tuple[int, int, int]:
        """Return the lengths of the residuals of ``count`` values, own and of shards, and of a chunk."""
        own, shard = self.spans(group, count, device)
        return sum(map(len, own)), sum(map(len, shard)), self._chunk_values(group, count, device)

    def free(self) -> None:
        """Free the scratch memory; it is allocated again when needed."""
        self._scratches.clear()

    def _exchanges(
        self, group: dist.ProcessGroup, values: Values, wire: Wire
    ) -> Iterator[Callable[[Scratch], Exchange]]:
        shard_start, levels = 0, self.levels(group, values.count)
        for index, chunk in enumerate(self._chunks(group, values.count, values.device)):
            exchange = partial(
                average_quantized, wire=wire, index=index, own_start=chunk.start, shard_start=shard_start
            )
            yield values.exchanged(chunk, exchange)
            shard_start += sum(map(len, self._shards([chunk], levels, group.rank())))

    def _shards(self, chunks: Iterable[Span], levels: Levels, rank: int) -> list[Span]:
        """Return the values whose means this rank computes, by chunk and level; of two ranks, none."""
        if levels.ranks <= 2:
            return []
        return [shard for chunk in chunks for shard in levels.shards(chunk, rank, self.scatter.block_size)]

    def _require_product(self, count: int, of_what: str) -> None:
        if self._chosen is not None and self._chosen.ranks != count:
            raise ValueError(
                f"the product of levels {self._chosen.sizes} is not {count}, the number of {of_what}"
            )

    def _take_turns(self, exchanges: Iterator[Callable[[Scratch], Exchange]], device: torch.device) -> None:
        take_turns(exchanges, self._scratches.setdefault(device, []), device)

    def _exchange_shards(
        self,
        group: dist.ProcessGroup,
        shard: torch.Tensor,
        exchange: Callable[[int, Span], Callable[[Scratch], Exchange]],
    ) -> None:
        """Exchange all ranks' shards, a piece of each at a time; the pieces together are one chunk."""
        direct = Levels((group.size(),))
        in_all = chunk_values(direct, on_streams=not self._transport.on_host(group, shard.device))
        chunks = cut(
            shard.numel(), max(in_all // group.size(), self.scatter.block_size), self.scatter.block_size
        )
        self._take_turns((exchange(index, chunk) for index, chunk in enumerate(chunks)), shard.device)

    def _chunks(self, group: dist.ProcessGroup, count: int, device: torch.device) -> list[Span]:
        return cut(count, self._chunk_values(group, count, device), self.scatter.block_size)

    def _chunk_values(self, group: dist.ProcessGroup, count: int, device: torch.device) -> int:
        return chunk_values(self.levels(group, count), on_streams=not self._transport.on_host(group, device))
