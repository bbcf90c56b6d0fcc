"""The plan of an average: who sends which values to whom, and in which format.

A plan is immutable, and made from numbers that all ranks know, without communication (by
:mod:`ddp_quant_hooks.exchange.planner`). The ranks of a row share the work of averaging: each is the reducer
of some shards of the values, gets the others' parts of these, and sends back the mean. If ranks share hosts,
the first row is that of a host, and the reducers of a shard on all hosts are the next row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

import torch

from ddp_quant_hooks.kernels import Layout


@dataclass(frozen=True)
class Span:
    """Elements ``start`` to ``stop`` of something flat.

    Attributes:
        start: The first element.
        stop: The one after the last.
        weight: Of residuals: the share of such a value in the mean of all ranks. Residuals of different
            weights do not mix.
    """

    start: int
    stop: int
    weight: float = 0.0

    def __len__(self) -> int:
        return self.stop - self.start


class Way(enum.Enum):
    """How the ranks of a row average some values."""

    FULL = enum.auto()
    """Each reducer sums its shards in full precision, averages them further, and hands the means on."""
    FEW_BITS = enum.auto()
    """The same, with values that are sent in few bits."""
    TWO_SHOTS = enum.auto()
    """Values are sent in few bits; each reducer averages its shard and sends the mean, in few bits again."""
    ONE_SHOT = enum.auto()
    """Two ranks send each other all values in few bits: as many bytes as by two shots, and rounded once."""


@dataclass(frozen=True)
class Formats:
    """How values are sent.

    Attributes:
        scatter: The format in which values are sent to the reducer of their shard.
        gather: The format in which reducers send means.
        value_bytes: The size of a value in full precision.
    """

    scatter: Layout
    gather: Layout
    value_bytes: int


@dataclass(frozen=True)
class Packing:
    """Where parts are in memory that has those of one reducer next to each other, as they are sent together.

    Attributes:
        sizes: Of each part.
        reducers: The position in the row of each part's reducer.
        ranks: The number of ranks in the row.
    """

    sizes: tuple[int, ...]
    reducers: tuple[int, ...]
    ranks: int

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The parts in the order of memory."""
        return tuple(sorted(range(len(self.sizes)), key=self.reducers.__getitem__))

    @cached_property
    def message_sizes(self) -> tuple[int, ...]:
        """The size of all parts of each reducer."""
        sizes = [0] * self.ranks
        for size, reducer in zip(self.sizes, self.reducers, strict=True):
            sizes[reducer] += size
        return tuple(sizes)

    @cached_property
    def total(self) -> int:
        """The size of all parts."""
        return sum(self.sizes)

    def parts(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return all parts, in their own order."""
        sizes, numbers = self._in_memory
        parts = memory.split_with_sizes(sizes)
        return [parts[number] for number in numbers]

    @cached_property
    def _in_memory(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes of parts in the order of memory, and the number of each part there."""
        numbers = {part: number for number, part in enumerate(self.order)}
        sizes = tuple(self.sizes[part] for part in self.order)
        return sizes, tuple(numbers[part] for part in range(len(self.sizes)))

    def messages(self, memory: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return what is sent together: all parts of each reducer."""
        return memory.split_with_sizes(self.message_sizes)


Slot: TypeAlias = Literal["own", "shard"]
"""What is rounded: values that this rank is the first to round, or means that it has computed."""


@dataclass(frozen=True)
class Lost:
    """Where the rounding errors of some values are kept.

    Attributes:
        slot: Among those of these values.
        start: The first one, in the order of the slot.
    """

    slot: Slot
    start: int


@dataclass(frozen=True)
class Stage:
    """What one rank does to average some neighboring values of a chunk with the ranks of a row.

    Attributes:
        way: How.
        ranks: The ranks of the row, in the group.
        position: Of this rank in the row.
        tag: Distinguishes the messages of this stage from those of the chunk's other stages, on all ranks.
        lengths: The number of values of each shard.
        outgoing: The packing of what is sent to the reducers of the shards: a part is of a shard.
        means: The packing of what they send back: a part is a message of a mean.
        mean_layout: The format of these messages.
        mean_lengths: For each shard, of how many neighboring values each of its messages is the mean.
        messages_per_mean: How many messages there are of the same values, whose mean is to be computed: after
            one shot both ranks', else one.
        lost: Where the rounding errors of the values are kept, if they are rounded here.
        lost_mean: Where those of this rank's mean are kept, if it is rounded here.
        factor: By what the row's sum (``FULL``) or mean (``FEW_BITS``) is multiplied before it is averaged
            further.
        further: For each shard whose reducer this rank is, how it is averaged with other rows.
    """

    way: Way
    ranks: tuple[int, ...]
    position: int
    tag: int
    lengths: tuple[int, ...]
    outgoing: Packing
    means: Packing
    mean_layout: Layout
    mean_lengths: tuple[tuple[int, ...], ...] = ()
    messages_per_mean: int = 1
    lost: Lost | None = None
    lost_mean: Lost | None = None
    factor: float = 1.0
    further: tuple[Stage, ...] = ()

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The shards whose reducer this rank is."""
        return tuple(
            shard for shard, reducer in enumerate(self.outgoing.reducers) if reducer == self.position
        )

    @cached_property
    def peers(self) -> tuple[int, ...]:
        """The positions of the other ranks, the next one first: not all ranks send to the same one."""
        size = len(self.ranks)
        return tuple((self.position + step) % size for step in range(1, size))

    def messages_of_means(self, memory: torch.Tensor) -> list[list[torch.Tensor]]:
        """Return the messages of each mean, in the order of shards, in the memory of :attr:`means`."""
        messages, several = self.means.parts(memory), self.messages_per_mean
        return [messages[first : first + several] for first in range(0, len(messages), several)]

    @cached_property
    def decoded_lengths(self) -> tuple[int, ...]:
        """Of how many values each mean of messages is, in the order of shards."""
        return tuple(length for some in self.mean_lengths for length in some)

    @cached_property
    def waits(self) -> int:
        """How often it waits for messages."""
        return 1 if self.way is Way.ONE_SHOT else 2 + max((one.waits for one in self.further), default=0)

    def sends(self, value_bytes: int) -> Iterator[tuple[int, int]]:
        """Yield the rank and the bytes of every message that this rank sends."""
        unit = value_bytes if self.way is Way.FULL else 1
        for peer in self.peers:
            yield self.ranks[peer], unit * self.outgoing.message_sizes[peer]
            if self.way is not Way.ONE_SHOT:
                yield self.ranks[peer], self.means.message_sizes[self.position]
        for stage in self.further:
            yield from stage.sends(value_bytes)


@dataclass(frozen=True)
class Delivery:
    """How a reduce-scatter brings the sums of hosts to the ranks whose shards they are.

    Attributes:
        receivers: The rank that gets each sum of this rank, in their order; itself too.
        senders: The ranks that send this one a sum; itself too.
        lost: Where the rounding errors of this rank's sums are kept.
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
            me, size = self.stage.ranks[self.stage.position], formats.scatter.message_bytes(len(self.span))
            yield from ((rank, size) for rank in self.delivery.receivers if rank != me)


@dataclass(frozen=True)
class Plan:
    """How one rank takes part in an average.

    Attributes:
        formats: Of all messages.
        chunks: In their order.
        enlarge: By what means are multiplied when they have been decoded.
        slots: The values that this rank rounds, by slot, in the order of their rounding errors in memory.
        bytes_sent: The bytes of all messages that this rank sends.
        bytes_between_hosts: The bytes of those to ranks on other hosts.
    """

    formats: Formats
    chunks: tuple[Chunk, ...]
    enlarge: float
    slots: Mapping[Slot, tuple[Span, ...]]
    bytes_sent: int
    bytes_between_hosts: int
