"""Make plans: cut values into chunks and these into shards, and note what each rank rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ddp_quant_hooks.exchange.levels import choose_levels, chunk_values
from ddp_quant_hooks.exchange.placement import Placement
from ddp_quant_hooks.exchange.plan import (
    Chunk,
    Delivery,
    Formats,
    Lost,
    Packing,
    Plan,
    Slot,
    Span,
    Stage,
    Way,
)

_MOST_SHARDS = 4
"""The most shards for each rank of the largest host: with hosts of unequal size, a shard goes to one rank of
each host, and all ranks of a host reduce equally many if the number of shards is a multiple of theirs."""


def plan_average(
    placement: Placement,
    rank: int,
    count: int,
    formats: Formats,
    *,
    levels: tuple[int, ...] | None = None,
    on_streams: bool = False,
) -> Plan:
    """Plan the average of ``count`` values on all ranks.

    Args:
        placement: Where the ranks are.
        rank: This rank.
        count: The number of values.
        formats: Of all messages.
        levels: The sizes of the rows of each level: of hosts if ranks average inside a host first, else of
            ranks. ``None``: chosen.
        on_streams: Whether the host only enqueues.

    Raises:
        ValueError: The product of ``levels`` is not the number of ranks, or of hosts.
    """
    planner = _Planner(placement, rank, formats)
    shards = _shard_count([len(row) for row in planner.rows])
    sizes = levels or choose_levels(len(planner.rows), -(-count // shards))
    if math.prod(sizes) != len(planner.rows):
        of_what = "ranks of the process group" if placement.inside == "flat" else "hosts"
        raise ValueError(f"the product of levels {sizes} is not {len(planner.rows)}, the number of {of_what}")
    # The same on all ranks: the peers of a rank on the largest host.
    peers = sum(size - 1 for size in sizes) + max(map(len, planner.rows)) - 1
    most = chunk_values(peers, on_streams=on_streams)
    return planner.plan(
        Chunk(span, planner.average(span, shards, sizes)) for span in cut(count, most, planner.block_size)
    )


def plan_reduce_scatter(
    placement: Placement, rank: int, count: int, formats: Formats, *, on_streams: bool = False
) -> Plan:
    """Plan a reduce-scatter: the average of every rank's shard of ``count`` values on that rank.

    Args:
        placement: Where the ranks are.
        rank: This rank.
        count: The number of values of a shard.
        formats: Of all messages.
        on_streams: Whether the host only enqueues.
    """
    planner = _Planner(placement, rank, formats)
    world_size = len(placement.hosts)
    in_all = chunk_values(world_size - 1, on_streams=on_streams)
    most = max(in_all // world_size, planner.block_size)
    return planner.plan(planner.reduce_scatter(span, count) for span in cut(count, most, planner.block_size))


def cut(length: int, most: int, block_size: int) -> list[Span]:
    """Cut ``length`` elements into chunks of at most about ``most``, at block boundaries.

    The first and the last are half as long as the others: the wire idles while the first is encoded and
    while the last is decoded.
    """
    count = -(-length // most)
    if count <= 1:
        return [Span(0, length)]
    blocks = -(-length // block_size)
    cuts = [(2 * index + 1) * blocks // (2 * count) for index in range(count)]
    bounds = [0, *cuts, blocks]
    spans = [Span(low * block_size, min(high * block_size, length)) for low, high in pairwise(bounds)]
    return [span for span in spans if len(span)]


def shard_lengths(length: int, count: int, block_size: int) -> tuple[int, ...]:
    """Cut a chunk into shards at block boundaries, and return their lengths; some are 0 if blocks are few."""
    blocks = -(-length // block_size)
    bounds = [blocks * index // count * block_size for index in range(count)]
    return tuple(high - low for low, high in pairwise([*bounds, length]))  # the last block may be shorter


def _shard_count(sizes: Sequence[int]) -> int:
    """Return in how many shards values are averaged between hosts of these sizes."""
    common, largest = math.lcm(*sizes), max(sizes)
    return common if common <= _MOST_SHARDS * largest else largest


class _Rounded:
    """What one rank rounds, in the order in which it is noted: that of its rounding errors in memory."""

    def __init__(self) -> None:
        self._spans: dict[Slot, list[Span]] = {"own": [], "shard": []}
        self._counts: dict[Slot, int] = {"own": 0, "shard": 0}

    def note(self, slot: Slot, *spans: Span, weight: float) -> Lost:
        """Note values that are rounded next, and their weight in the mean of all ranks."""
        lost = Lost(slot, self._counts[slot])
        self._counts[slot] += sum(map(len, spans))
        self._spans[slot].extend(replace(span, weight=weight) for span in spans if len(span))
        return lost

    def slots(self) -> Mapping[Slot, tuple[Span, ...]]:
        """Return all of it."""
        return {slot: tuple(spans) for slot, spans in self._spans.items()}


class _Planner:
    """Makes the stages of one rank."""

    def __init__(self, placement: Placement, rank: int, formats: Formats) -> None:
        self._placement, self._rank, self._formats = placement, rank, formats
        self.block_size = formats.scatter.block_size
        self._world_size = world_size = len(placement.hosts)
        flat = placement.inside == "flat"
        self.rows = [[one] for one in range(world_size)] if flat else placement.rows()
        self._row = next(row for row in self.rows if rank in row)
        self._position = self._row.index(rank)
        self._way = Way.FULL if placement.inside == "full" else Way.FEW_BITS
        self._rounded = _Rounded()
        # Each row hands on its sum times a factor. The mean over rows of that, times `enlarge`, is the mean
        # over ranks: factor = rows / (ranks x enlarge). And no row may hand on more than its largest value:
        # (ranks of the largest row) x factor <= 1. With rows of one and of three ranks, factor = 2 / (4 x 2):
        # they hand on 1/4 and 3/4 of a value that all ranks have, the mean of which is half of it.
        rows, most = len(self.rows), max(map(len, self.rows))
        self._enlarge = 2.0 ** math.ceil(math.log2(rows * most / world_size))
        self._factor = rows / world_size / self._enlarge
        if self._way is Way.FEW_BITS:  # of the row's mean
            self._factor *= len(self._row)

    def plan(self, chunks: Iterable[Chunk]) -> Plan:
        """Return the plan of these chunks."""
        made = tuple(chunks)
        hosts, sent, outside = self._placement.hosts, 0, 0
        for rank, size in (message for chunk in made for message in chunk.sends(self._formats)):
            sent += size
            outside += size if hosts[rank] != hosts[self._rank] else 0
        return Plan(self._formats, made, self._enlarge, self._rounded.slots(), sent, outside)

    def average(self, span: Span, shards: int, sizes: tuple[int, ...]) -> Stage:
        """Return the stage of a chunk that all ranks get.

        Args:
            span: Of the chunk.
            shards: Their number.
            sizes: Of the levels in which rows average.
        """
        if max(map(len, self.rows)) == 1:
            return self._between([row[0] for row in self.rows], span, sizes, tag=1, rounded=False)
        rounded = self._way is not Way.FULL
        lengths = shard_lengths(len(span), shards, self.block_size)
        reducers = tuple(shard % len(self._row) for shard in range(shards))
        lost = self._rounded.note("own", span, weight=1 / self._world_size) if rounded else None
        further = tuple(
            self._between(
                [row[shard % len(row)] for row in self.rows],
                part,
                sizes,
                tag=1 + len(sizes) * shard,
                rounded=rounded,
            )
            for shard, part in enumerate(_parts(span, lengths))
            if reducers[shard] == self._position
        )
        stage = self._stage(
            self._way,
            self._row,
            0,
            lengths,
            reducers,
            [self._mean_lengths(length, sizes, rounded=rounded) for length in lengths],
            messages_per_mean=2 if _is_one_shot(sizes, rounded=rounded) else 1,
        )
        return replace(stage, lost=lost, factor=self._factor, further=further)

    def _between(
        self, ranks: list[int], span: Span, sizes: tuple[int, ...], *, tag: int, rounded: bool
    ) -> Stage:
        """Return the stage of values that these ranks average, in levels of these sizes.

        Args:
            ranks: In the group.
            span: Where the values are.
            sizes: The number of ranks in a row of each level.
            tag: Of the stage; stages of further levels have the next ones.
            rounded: Whether the values are means of others that were rounded.
        """
        size, *rest = sizes
        number, position = divmod(ranks.index(self._rank), size)
        row = ranks[number * size :][:size]
        weight = self._enlarge / len(ranks)
        lost = self._rounded.note("shard" if rounded else "own", span, weight=weight)
        if _is_one_shot(sizes, rounded=rounded):
            means = [self._mean_lengths(len(span), sizes, rounded=rounded)]
            stage = self._stage(Way.ONE_SHOT, row, tag, (len(span),), (0,), means, messages_per_mean=2)
            return replace(stage, lost=lost)
        lengths = shard_lengths(len(span), size, self.block_size)
        own = list(_parts(span, lengths))[position]
        way = Way.FEW_BITS if rest else Way.TWO_SHOTS
        means = [self._mean_lengths(length, tuple(rest), rounded=True) for length in lengths]
        stage = replace(self._stage(way, row, tag, lengths, tuple(range(size)), means), lost=lost)
        if not rest:
            return replace(stage, lost_mean=self._rounded.note("shard", own, weight=self._enlarge))
        across = ranks[position::size]
        further = self._between(across, own, tuple(rest), tag=tag + 1, rounded=True)
        return replace(stage, further=(further,))

    def reduce_scatter(self, span: Span, count: int) -> Chunk:
        """Return a chunk of every rank's shard, each of ``count`` values."""
        world_size = self._world_size
        row = self._row if max(map(len, self.rows)) > 1 else list(range(world_size))
        position_of = {rank: position for one in self.rows for position, rank in enumerate(one)}
        reducers = tuple(
            row.index(rank) if rank in row else position_of[rank] % len(row) for rank in range(world_size)
        )
        shards = [Span(rank * count + span.start, rank * count + span.stop) for rank in range(world_size)]
        lengths = (len(span),) * world_size
        full = self._way is Way.FULL and len(row) < world_size
        lost = None if full else self._rounded.note("own", *shards, weight=1 / world_size)
        way = Way.FULL if full else Way.FEW_BITS
        stage = replace(self._stage(way, row, 0, lengths, reducers, []), lost=lost)
        if len(row) == world_size:
            return Chunk(span, stage)
        stage = replace(stage, factor=self._factor)
        senders = [self._rank if one is self._row else one[self._position % len(one)] for one in self.rows]
        sums = [shards[rank] for rank in stage.reduced]
        weight = self._enlarge / len(self.rows)
        lost_sums = self._rounded.note("own" if full else "shard", *sums, weight=weight)
        return Chunk(span, stage, Delivery(stage.reduced, tuple(senders), lost_sums))

    def _stage(
        self,
        way: Way,
        row: Sequence[int],
        tag: int,
        lengths: tuple[int, ...],
        reducers: tuple[int, ...],
        mean_lengths: Sequence[tuple[int, ...]],
        *,
        messages_per_mean: int = 1,
    ) -> Stage:
        """Return a stage without residuals and without further ones."""
        scatter = self._formats.scatter
        # After one shot values as they were sent are handed on, not their mean.
        mean_layout = self._formats.gather if messages_per_mean == 1 else scatter
        means = [
            (mean_layout.message_bytes(length), reducer)
            for reducer, some in zip(reducers, mean_lengths, strict=False)  # a reduce-scatter has no means
            for length in some
            for _ in range(messages_per_mean)
        ]
        outgoing = lengths if way is Way.FULL else tuple(map(scatter.message_bytes, lengths))
        outgoing_packing = Packing(outgoing, reducers, len(row))
        if way is Way.ONE_SHOT:  # each sends all
            outgoing_packing = Packing(outgoing * 2, (0, 1), 2)
        return Stage(
            way,
            tuple(row),
            list(row).index(self._rank),
            tag,
            lengths,
            outgoing_packing,
            Packing(tuple(size for size, _ in means), tuple(reducer for _, reducer in means), len(row)),
            mean_layout,
            tuple(mean_lengths),
            messages_per_mean,
        )

    def _mean_lengths(self, length: int, sizes: tuple[int, ...], *, rounded: bool) -> tuple[int, ...]:
        """Return of how many values each message of the mean is that a row of these levels sends."""
        if not sizes or _is_one_shot(sizes, rounded=rounded):
            return (length,)
        size, *rest = sizes
        return tuple(
            of_message
            for part in shard_lengths(length, size, self.block_size)
            for of_message in self._mean_lengths(part, tuple(rest), rounded=True)
        )


def _is_one_shot(sizes: tuple[int, ...], *, rounded: bool) -> bool:
    """Return whether two ranks send each other all values, which are not rounded yet.

    Means of rows that are rounded already go through a reducer: both messages of a pair would have to be sent
    on to all ranks of the rows, where one is as exact.
    """
    return sizes == (2,) and not rounded


def _parts(span: Span, lengths: Sequence[int]) -> Iterator[Span]:
    """Yield the neighboring parts of a span that have these lengths."""
    start = span.start
    for length in lengths:
        yield Span(start, start + length)
        start += length
