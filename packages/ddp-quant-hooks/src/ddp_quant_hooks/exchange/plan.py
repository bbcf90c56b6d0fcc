"""The plan of an average: who sends which values to whom, and in which format.

A plan is immutable, and made from numbers that all ranks know, without communication. The ranks of a row
share the work of averaging: each owns some shards of the values, gets the others' parts of these, and sends
back the mean. If ranks share hosts, the first row is that of a host, and the owners of a shard on all hosts
are the next row.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, TypeAlias

import torch

from ddp_quant_hooks.exchange.levels import choose_levels, chunk_values
from ddp_quant_hooks.exchange.placement import Placement
from ddp_quant_hooks.exchange.spans import Span, cut, shard_lengths
from ddp_quant_hooks.kernels import Layout

_MOST_SHARDS = 4
"""The most shards for each rank of the largest host: with hosts of unequal size, a shard goes to one rank of
each host, and all ranks of a host own equally many if the number of shards is a multiple of theirs."""


_MOST_PLANS = 1 << 12
"""How many plans are kept: of calls whose tensors have another length in every step, not all of them."""


class Way(enum.Enum):
    """How the ranks of a row average some values."""

    FULL = enum.auto()
    """Each owner sums its shards in full precision, and averages them further."""
    FEW_BITS = enum.auto()
    """The same, with values that are sent in few bits."""
    TWO_SHOT = enum.auto()
    """Values are sent in few bits; each owner averages its shard and sends the mean, in few bits again."""
    ONE_SHOT = enum.auto()
    """Two ranks send each other all values in few bits: as many bytes as by two shots, and rounded once."""


@dataclass(frozen=True)
class Formats:
    """How values are sent.

    Attributes:
        scatter: The format in which values are sent to the owner of their shard.
        gather: The format in which owners send means.
        value_bytes: The size of a value in full precision.
    """

    scatter: Layout
    gather: Layout
    value_bytes: int


@dataclass(frozen=True)
class Packing:
    """Where shards are in memory that has those of one owner next to each other: a message for each owner.

    Attributes:
        sizes: Of each shard.
        owners: The place in the row of each shard's owner.
        ranks: The number of ranks in the row.
    """

    sizes: tuple[int, ...]
    owners: tuple[int, ...]
    ranks: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The shards in the order of memory."""
        return tuple(sorted(range(len(self.sizes)), key=self.owners.__getitem__))

    @cached_property
    def owned_sizes(self) -> tuple[int, ...]:
        """The size of all shards of each owner."""
        sizes = [0] * self.ranks
        for size, owner in zip(self.sizes, self.owners, strict=True):
            sizes[owner] += size
        return tuple(sizes)

    @property
    def total(self) -> int:
        """The size of all shards."""
        return sum(self.sizes)

    def shards(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of each shard, in the order of shards."""
        parts = dict(
            zip(self.order, torch.split(memory, [self.sizes[shard] for shard in self.order]), strict=True)
        )
        return [parts[shard] for shard in range(len(self.sizes))]

    def messages(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the part of each owner."""
        return torch.split(memory, list(self.owned_sizes))


Slot: TypeAlias = Literal["own", "shard"]


@dataclass(frozen=True)
class Lost:
    """Where a residual begins.

    Attributes:
        slot: Among those of values that this rank is the first to round (``"own"``), or of means that it has
            computed (``"shard"``).
        start: In the order of the slot's values.
    """

    slot: Slot
    start: int


@dataclass(frozen=True)
class Stage:
    """What one rank does to average some neighboring values of a chunk with the ranks of a row.

    Attributes:
        way: How.
        ranks: The ranks of the row, in the group.
        place: This rank's place in the row.
        tag: Distinguishes the messages of this stage from those of the chunk's other stages, on all ranks.
        lengths: The number of values of each shard.
        outgoing: The packing of what is sent to the owners of the shards.
        answers: The packing of what they send back: for each shard, messages of its mean.
        answer: The format of these messages.
        pieces: For each shard, the lengths of the pieces that these messages are of.
        copies: How many messages each piece has, whose mean it is.
        lost: Where the residual of the values begins, if they are rounded here.
        lost_mean: Where the residual of this rank's mean begins, if it is rounded here.
        factor: By what the row's sum (``FULL``) or mean (``FEW_BITS``) is multiplied before it is averaged
            further.
        further: For each shard of this rank, how it is averaged with other rows.
    """

    way: Way
    ranks: tuple[int, ...]
    place: int
    tag: int
    lengths: tuple[int, ...]
    outgoing: Packing
    answers: Packing
    answer: Layout
    pieces: tuple[tuple[int, ...], ...] = ()
    copies: int = 1
    lost: Lost | None = None
    lost_mean: Lost | None = None
    factor: float = 1.0
    further: tuple[Stage, ...] = ()

    @cached_property
    def owned(self) -> tuple[int, ...]:
        """The shards that this rank owns."""
        return tuple(shard for shard, owner in enumerate(self.outgoing.owners) if owner == self.place)

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The places of the other ranks, the next one first, so that not all ranks send to the same one."""
        size = len(self.ranks)
        return tuple((self.place + step) % size for step in range(1, size))

    @cached_property
    def turns(self) -> int:
        """How often it waits for messages."""
        return 1 if self.way is Way.ONE_SHOT else 2 + max((one.turns for one in self.further), default=0)

    def sends(self, value_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the rank and the bytes of every message that this rank sends."""
        unit = value_bytes if self.way is Way.FULL else 1
        for peer in self.peers:
            yield self.ranks[peer], unit * self.outgoing.owned_sizes[peer]
            if self.way is not Way.ONE_SHOT:
                yield self.ranks[peer], self.answers.owned_sizes[self.place]
        for stage in self.further:
            yield from stage.sends(value_bytes)


@dataclass(frozen=True)
class Delivery:
    """How a reduce-scatter brings the sums of hosts to the ranks whose shards they are.

    Attributes:
        receivers: The rank that gets each sum of this rank, in their order; itself too.
        senders: The ranks that send this one a sum; itself too.
        lost: Where the residual of this rank's sums begins.
    """

    receivers: tuple[int, ...]
    senders: tuple[int, ...]
    lost: Lost


@dataclass(frozen=True)
class Chunk:
    """Values that are averaged at a time.

    Attributes:
        span: Where they are in the bucket; in a reduce-scatter, in every shard of it.
        stage: How they are averaged, or summed inside a host.
        delivery: Where the sums go, in a reduce-scatter between hosts.
    """

    span: Span
    stage: Stage
    delivery: Delivery | None = None

    def sends(self, formats: Formats) -> Iterator[tuple[int, int]]:
        """Yield the rank and the bytes of every message that this rank sends."""
        yield from self.stage.sends(formats.value_bytes)
        if self.delivery is not None:
            me, size = self.stage.ranks[self.stage.place], formats.scatter.message_bytes(len(self.span))
            yield from ((rank, size) for rank in self.delivery.receivers if rank != me)


@dataclass(frozen=True)
class Plan:
    """How one rank takes part in an average.

    Attributes:
        formats: Of all messages.
        chunks: In their order.
        enlarge: By what means are multiplied when they have been decoded.
        slots: The values that this rank rounds, in the order of their residuals, by slot.
        bytes_sent: The bytes of all messages that this rank sends.
        bytes_between_hosts: The bytes of those to ranks on other hosts.
    """

    formats: Formats
    chunks: tuple[Chunk, ...]
    enlarge: float
    slots: Mapping[Slot, tuple[Span, ...]]
    bytes_sent: int
    bytes_between_hosts: int


@lru_cache(maxsize=_MOST_PLANS)
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


@lru_cache(maxsize=_MOST_PLANS)
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


def _shard_count(sizes: Sequence[int]) -> int:
    """Return in how many shards values are averaged between hosts of these sizes."""
    common, largest = math.lcm(*sizes), max(sizes)
    return common if common <= _MOST_SHARDS * largest else largest


class _Planner:
    """Makes the stages of one rank, and notes what is rounded where."""

    def __init__(self, placement: Placement, rank: int, formats: Formats) -> None:
        self._placement, self._rank, self._formats = placement, rank, formats
        self.block_size = formats.scatter.block_size
        world_size = len(placement.hosts)
        flat = placement.inside == "flat"
        self.rows = [[one] for one in range(world_size)] if flat else placement.rows()
        self._row = next(row for row in self.rows if rank in row)
        # What is rounded: where, and how many values so far.
        self._slots: dict[Slot, list[Span]] = {"own": [], "shard": []}
        self._lost: dict[Slot, int] = {"own": 0, "shard": 0}
        self._world_size = world_size
        # The mean over rows of what each row hands on is the mean over ranks, made smaller by a power of two
        # if a large row would hand on more than its largest value.
        largest = len(self.rows) * max(map(len, self.rows)) / world_size
        self.enlarge = 2.0 ** math.ceil(math.log2(largest))
        share = len(self.rows) / world_size / self.enlarge
        self._way = Way.FULL if placement.inside == "full" else Way.FEW_BITS
        self._factor = share if self._way is Way.FULL else share * len(self._row)

    def plan(self, chunks: Iterable[Chunk]) -> Plan:
        """Return the plan of these chunks."""
        made = tuple(chunks)
        hosts, sent, outside = self._placement.hosts, 0, 0
        for rank, size in (message for chunk in made for message in chunk.sends(self._formats)):
            sent += size
            outside += size if hosts[rank] != hosts[self._rank] else 0
        slots = {slot: tuple(spans) for slot, spans in self._slots.items()}
        return Plan(self._formats, made, self.enlarge, slots, sent, outside)

    def average(self, span: Span, shards: int, sizes: tuple[int, ...]) -> Stage:
        """Return the stage of a chunk that all ranks get."""
        if max(map(len, self.rows)) == 1:
            return self._between([row[0] for row in self.rows], span, sizes, tag=1, rounded=False)
        row, place, full = self._row, self._row.index(self._rank), self._way is Way.FULL
        lengths = shard_lengths(len(span), shards, self.block_size)
        lost = None if full else self._lose(span, of_means=False, weight=1 / self._world_size)
        owners = tuple(shard % len(row) for shard in range(shards))
        further = tuple(
            self._between(
                [one[shard % len(one)] for one in self.rows],
                part,
                sizes,
                tag=1 + len(sizes) * shard,
                rounded=not full,
            )
            for shard, part in enumerate(_parts(span, lengths))
            if owners[shard] == place
        )
        pieces = [_pieces(length, sizes, self.block_size, rounded=not full) for length in lengths]
        copies = 2 if _is_one_shot(sizes, rounded=not full) else 1
        stage = self._stage(self._way, row, 0, lengths, owners, pieces, copies)
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
        place = ranks.index(self._rank)
        row = ranks[place // size * size :][:size]
        place %= size
        lost = self._lose(span, of_means=rounded, weight=self.enlarge / len(ranks))
        if _is_one_shot(sizes, rounded=rounded):
            pieces = [_pieces(len(span), sizes, self.block_size, rounded=rounded)]
            stage = self._stage(Way.ONE_SHOT, row, tag, (len(span),), (0,), pieces, copies=2)
            return replace(stage, lost=lost)
        lengths = shard_lengths(len(span), size, self.block_size)
        own = list(_parts(span, lengths))[place]
        pieces = [_pieces(length, tuple(rest), self.block_size, rounded=True) for length in lengths]
        way = Way.FEW_BITS if rest else Way.TWO_SHOT
        stage = self._stage(way, row, tag, lengths, tuple(range(size)), pieces)
        if not rest:
            return replace(stage, lost=lost, lost_mean=self._lose(own, of_means=True, weight=self.enlarge))
        across = ranks[ranks.index(self._rank) % size :: size]
        further = self._between(across, own, tuple(rest), tag=tag + 1, rounded=True)
        return replace(stage, lost=lost, further=(further,))

    def reduce_scatter(self, span: Span, count: int) -> Chunk:
        """Return a chunk of every rank's shard, each of ``count`` values."""
        world_size = len(self._placement.hosts)
        row = self._row if max(map(len, self.rows)) > 1 else list(range(world_size))
        place_of = {rank: place for one in self.rows for place, rank in enumerate(one)}
        owners = tuple(
            row.index(rank) if rank in row else place_of[rank] % len(row) for rank in range(world_size)
        )
        shards = [Span(rank * count + span.start, rank * count + span.stop) for rank in range(world_size)]
        lengths = (len(span),) * world_size
        full = self._way is Way.FULL and len(row) < world_size
        lost = None if full else self._lose(*shards, of_means=False, weight=1 / world_size)
        way = Way.FULL if full else Way.FEW_BITS
        stage = replace(self._stage(way, row, 0, lengths, owners, []), lost=lost)
        if len(row) == world_size:
            return Chunk(span, stage)
        stage = replace(stage, factor=self._factor)
        senders = [
            self._rank if self._rank in one else one[place_of[self._rank] % len(one)] for one in self.rows
        ]
        sums = [shards[rank] for rank in stage.owned]
        lost = self._lose(*sums, of_means=not full, weight=self.enlarge / len(self.rows))
        return Chunk(span, stage, Delivery(stage.owned, tuple(senders), lost))

    def _stage(
        self,
        way: Way,
        row: Sequence[int],
        tag: int,
        lengths: tuple[int, ...],
        owners: tuple[int, ...],
        pieces: Sequence[tuple[int, ...]],
        copies: int = 1,
    ) -> Stage:
        """Return a stage without residuals and without further ones."""
        scatter = self._formats.scatter
        answer = self._formats.gather if copies == 1 else scatter  # values as they came, not their mean
        answers = tuple(copies * sum(map(answer.message_bytes, lengths)) for lengths in pieces)
        outgoing = lengths if way is Way.FULL else tuple(map(scatter.message_bytes, lengths))
        if way is Way.ONE_SHOT:  # each sends all
            outgoing_packing = Packing(outgoing * 2, (0, 1), 2)
        else:
            outgoing_packing = Packing(outgoing, owners, len(row))
        return Stage(
            way,
            tuple(row),
            list(row).index(self._rank),
            tag,
            lengths,
            outgoing_packing,
            Packing(answers, owners[: len(answers)], len(row)),
            answer,
            tuple(pieces),
            copies,
        )

    def _lose(self, *spans: Span, of_means: bool, weight: float) -> Lost:
        """Note that values are rounded, and their weight in the mean; return where their residual begins."""
        slot: Slot = "shard" if of_means else "own"
        lost = Lost(slot, self._lost[slot])
        self._lost[slot] += sum(map(len, spans))
        self._slots[slot].extend(replace(span, weight=weight) for span in spans if len(span))
        return lost


def _is_one_shot(sizes: tuple[int, ...], *, rounded: bool) -> bool:
    """Return whether two ranks send each other all values, which are not rounded yet.

    Means of rows that are rounded already go through an owner: both messages of a pair would have to be sent
    on to all ranks of the rows, where one is as exact.
    """
    return sizes == (2,) and not rounded


def _pieces(length: int, sizes: tuple[int, ...], block_size: int, *, rounded: bool) -> tuple[int, ...]:
    """Return the lengths of the pieces of which a row of these levels sends means."""
    if not sizes or _is_one_shot(sizes, rounded=rounded):
        return (length,)
    size, *rest = sizes
    return tuple(
        piece
        for part in shard_lengths(length, size, block_size)
        for piece in _pieces(part, tuple(rest), block_size, rounded=True)
    )


def _parts(span: Span, lengths: Sequence[int]) -> Iterator[Span]:
    """Yield the neighboring parts of a span that have these lengths."""
    start = span.start
    for length in lengths:
        yield Span(start, start + length)
        start += length
