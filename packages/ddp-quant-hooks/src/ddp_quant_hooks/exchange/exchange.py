"""Follow a plan: chunks are encoded, sent, averaged, sent back and decoded, several of them at a time.

The exchange of a chunk is a generator. It yields after it has started to send, and processes what has arrived
when it is resumed; meanwhile other chunks are computed and sent (see :func:`_take_turns`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import starmap
from typing import NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.plan import Chunk, Delivery, Lost, Plan, Stage, Way
from ddp_quant_hooks.exchange.values import Scratch, Values, put_back
from ddp_quant_hooks.kernels import Layout
from dist_utils import start_messages

T = TypeVar("T")

Parts: TypeAlias = Generator[None, None, T]
"""What runs with pauses, and returns a result."""

Exchange: TypeAlias = Parts[None]
"""An exchange of some values: it pauses wherever it would wait."""

NotFinite: TypeAlias = Callable[[torch.Tensor], None]
Residuals: TypeAlias = Callable[[str, int, int], tuple[torch.Tensor | None, torch.Tensor | None]]


class Task(NamedTuple):
    """How some values are averaged, the same way on every rank.

    Attributes:
        plan: Who sends what to whom.
        residual: Returns the rounding errors of some values, given the name of their slot, where they start
            in it, and how many they are: those of earlier steps, which are added, and the memory for those of
            this step; twice ``None`` where nothing is kept.
        not_finite: Called for each chunk with a flag, whether a value of its mean is not finite; ``None`` if
            that is not needed.
        label: What the messages are about; identical on all ranks. On Gloo, ranks with different labels wait
            for each other until the timeout.
    """

    plan: Plan
    residual: Residuals
    not_finite: NotFinite | None = None
    label: int = 0

    def residual_of(self, lost: Lost | None, length: int) -> dict[str, torch.Tensor | None]:
        """Return the residuals of some values, for the kernels."""
        if lost is None:
            return {}
        residual, new_residual = self.residual(lost.slot, lost.start, length)
        return {"residual": residual, "new_residual": new_residual}


def average_in_parts(
    group: dist.ProcessGroup, task: Task, values: Values, scratches: list[Scratch]
) -> Exchange:
    """Average ``values`` in place; all ranks end with the same bits. Pauses where it only waits for messages.

    Args:
        group: The process group whose ranks average.
        task: How they do.
        values: All of a bucket.
        scratches: Unused ones; the list grows to as many as are needed at a time.
    """

    def exchange(number: int, chunk: Chunk, scratch: Scratch) -> Exchange:
        of_chunk = _ChunkExchange(group, task, scratch, number)
        return of_chunk.all_reduce(chunk.stage, values.parts(chunk.span))

    values.mark_written()
    return _take_turns(task.plan, exchange, scratches, values.device)


def reduce_scatter(
    group: dist.ProcessGroup,
    task: Task,
    shards: torch.Tensor,
    mean: torch.Tensor,
    scratches: list[Scratch],
) -> None:
    """Average every rank's shard on that rank.

    Args:
        group: The process group whose ranks average.
        task: How they do.
        shards: This rank's values for all ranks, flat, one shard of equal length after another.
        mean: The output for the mean of this rank's shard; flat.
        scratches: As for :func:`average`.
    """
    rows = shards.view(-1, mean.numel())

    def exchange(number: int, chunk: Chunk, scratch: Scratch) -> Exchange:
        part = slice(chunk.span.start, chunk.span.stop)
        of_chunk = _ChunkExchange(group, task, scratch, number)
        return of_chunk.reduce_scatter(chunk, rows[:, part], mean[part])

    Values([mean]).mark_written()
    for _ in _take_turns(task.plan, exchange, scratches, mean.device):
        pass


def _take_turns(
    plan: Plan,
    exchange: Callable[[int, Chunk, Scratch], Exchange],
    scratches: list[Scratch],
    device: torch.device,
) -> Exchange:
    """Run the exchanges of all chunks as in a pipeline, in the same order on all ranks.

    The next one is started before older ones are resumed, so that the network is busy while they compute.
    Pauses when all are started.
    """

    def run(number: int, chunk: Chunk) -> Exchange:
        scratch = scratches.pop() if scratches else Scratch(device)
        scratch.start_over()
        yield from exchange(number, chunk, scratch)
        scratches.append(scratch)

    running: list[Exchange] = []
    for new in starmap(run, enumerate(plan.chunks)):
        running = [one for one in [new, *running] if _resume(one)]
    while running:
        yield
        running = [one for one in running if _resume(one)]


def _resume(exchange: Exchange) -> bool:
    """Let an exchange go on, and return whether it waits again."""
    return next(exchange, exchange) is not exchange


def together(exchanges: Iterable[Exchange]) -> Exchange:
    """Run exchanges side by side: all send, then all wait."""
    running = list(exchanges)
    while running := [one for one in running if _resume(one)]:
        yield


class _ChunkExchange(NamedTuple):
    """The exchange of one chunk.

    Attributes:
        group: The process group whose ranks average.
        task: How they do.
        scratch: Memory until the exchange is over.
        number: Of the chunk.
    """

    group: dist.ProcessGroup
    task: Task
    scratch: Scratch
    number: int

    # ---- a chunk ----

    def all_reduce(self, stage: Stage, parts: Sequence[torch.Tensor]) -> Exchange:
        """Average the parts of the chunk in place: all ranks decode the same messages of its mean."""
        values = self._join(parts)
        means = self.scratch.take(stage.means.total)
        yield from self.average(stage, values, means)
        messages = stage.messages_of_means(means)
        self._decode(messages, stage.decoded_lengths, stage.mean_layout, values)
        if len(parts) > 1:
            put_back(parts, values)

    def reduce_scatter(self, chunk: Chunk, parts: torch.Tensor, mean: torch.Tensor) -> Exchange:
        """Average all ranks' values for this rank's shard."""
        stage, delivery = chunk.stage, chunk.delivery
        values = parts.view(-1) if parts.is_contiguous() else self._join(list(parts))
        if delivery is None:
            messages = self.scratch.take(stage.outgoing.total)
            incoming = yield from self._scatter_few_bits(stage, values, messages)
        else:
            sums = yield from self._sums(stage, values)
            incoming = yield from self._deliver(stage, delivery, sums, mean.numel())
        self._decode([incoming], [mean.numel()], self.task.plan.formats.scatter, mean)

    def _decode(
        self,
        messages: Sequence[Sequence[torch.Tensor]],
        lengths: Sequence[int],
        layout: Layout,
        means: torch.Tensor,
    ) -> None:
        """Decode means, shard by shard, and make them as large as they are."""
        if self.task.not_finite is not None:
            flat = [message for of_shard in messages for message in of_shard]
            of_each = [length for length, some in zip(lengths, messages, strict=True) for _ in some]
            self.task.not_finite(kernels.not_finite(flat, of_each, layout, check=False))
        factor = self.task.plan.enlarge
        if factor == 1:
            kernels.decode_shards(messages, lengths, layout, means, check=False)
            return
        # Not in fp16, in which the smallest numbers have no half.
        half = means.dtype == torch.float16
        large = self.scratch.take(means.numel(), torch.float32) if half else means
        kernels.decode_shards(messages, lengths, layout, large, check=False)
        largest = torch.finfo(means.dtype).max  # finite means stay finite
        enlarged = (large * factor).clamp_(-largest, largest)
        torch.where(large.isfinite(), enlarged, large, out=large)
        if half:
            means.copy_(large)

    # ---- a stage: `means` gets messages of the mean of `values`, the same on all ranks of the row ----

    def average(self, stage: Stage, values: torch.Tensor, means: torch.Tensor) -> Exchange:
        """Return the exchange that averages values as their stage says."""
        if not values.numel():  # on no rank of the row; the others still expect to take turns
            return (None for _ in range(stage.waits))
        if stage.way is Way.ONE_SHOT:
            return self.one_shot(stage, values, means)
        if stage.way is Way.TWO_SHOTS:
            return self.two_shots(stage, values, means)
        return self.hand_on(stage, values, means)

    def one_shot(self, stage: Stage, values: torch.Tensor, means: torch.Tensor) -> Exchange:
        """Send the other rank all values: both get both messages, whose mean is decoded."""
        (messages,) = stage.messages_of_means(means)
        own, layout = messages[stage.position], self.task.plan.formats.scatter
        residual = self.task.residual_of(stage.lost, values.numel())
        kernels.encode_shards(values, [own], stage.lengths, layout, **residual, check=False)
        yield from self._swap(stage, [own] * 2, messages, 0)

    def two_shots(self, stage: Stage, values: torch.Tensor, means: torch.Tensor) -> Exchange:
        """Send each reducer its shard, then all ranks the mean of this rank's shard."""
        incoming = yield from self._scatter_few_bits(stage, values, self._outgoing_memory(stage, means))
        length, formats = stage.lengths[stage.position], self.task.plan.formats
        mine = stage.means.messages(means)[stage.position]
        residual = self.task.residual_of(stage.lost_mean, length)
        kernels.reduce(incoming, formats.scatter, length, mine, formats.gather, **residual, check=False)
        yield from self._send_means(stage, means)

    def hand_on(self, stage: Stage, values: torch.Tensor, means: torch.Tensor) -> Exchange:
        """Average shards with other rows, each on its reducer, which hands the means on to its row."""
        sums = yield from self._sums(stage, values, means)
        parts = torch.split(sums, [stage.lengths[shard] for shard in stage.reduced])
        mine = stage.means.messages(means)[stage.position]
        memory = mine.split_with_sizes([further.means.total for further in stage.further])
        yield from together(map(self.average, stage.further, parts, memory))
        yield from self._send_means(stage, means)

    # ---- its parts ----

    def _sums(
        self, stage: Stage, values: torch.Tensor, means: torch.Tensor | None = None
    ) -> Parts[torch.Tensor]:
        """Return, in fp32, what the row contributes to the means of the shards whose reducer this rank is."""
        lengths = [stage.lengths[shard] for shard in stage.reduced]
        if stage.way is Way.FEW_BITS:
            incoming = yield from self._scatter_few_bits(stage, values, self._outgoing_memory(stage, means))
            sums = self.scratch.take(sum(lengths), torch.float32)
            layout = self.task.plan.formats.scatter
            sizes = [layout.message_bytes(length) for length in lengths]
            of_ranks = [torch.split(message, sizes) for message in incoming]
            kernels.decode_shards([*zip(*of_ranks, strict=True)], lengths, layout, sums, check=False)
            if stage.factor != 1:
                sums *= stage.factor
            return sums
        parts = torch.split(values, list(stage.lengths))
        by_reducer = list(zip(parts, stage.outgoing.reducers, strict=True))
        outgoing = [
            self._join([part for part, reducer in by_reducer if reducer == position])
            for position in range(len(stage.ranks))
        ]
        incoming = self._incoming(stage, outgoing)
        yield from self._swap(stage, outgoing, incoming, 0)
        sums = self.scratch.take(sum(lengths), torch.float32).zero_()
        # Made smaller first, as a sum of finite values may not be finite; by a power of two, which rounds
        # nothing but subnormal numbers.
        scale = 2.0 ** -math.ceil(math.log2(len(incoming)))
        for part in incoming:
            sums.add_(part, alpha=scale)
        if stage.factor != scale:
            sums *= stage.factor / scale
        return sums

    def _outgoing_memory(self, stage: Stage, means: torch.Tensor | None) -> torch.Tensor:
        """Return memory for a stage's outgoing messages.

        They live in the memory of the means where both are sent in messages of the same sizes: they have been
        sent before means arrive, and what this rank keeps is read before its own mean is written there.
        """
        if means is not None and stage.means.message_sizes == stage.outgoing.message_sizes:
            return means
        return self.scratch.take(stage.outgoing.total)

    def _scatter_few_bits(
        self, stage: Stage, values: torch.Tensor, memory: torch.Tensor
    ) -> Parts[list[torch.Tensor]]:
        """Send each reducer its shards; return every rank's messages of those whose reducer this rank is."""
        residual = self.task.residual_of(stage.lost, values.numel())
        layout, shards = self.task.plan.formats.scatter, stage.outgoing.parts(memory)
        kernels.encode_shards(values, shards, stage.lengths, layout, **residual, check=False)
        outgoing = stage.outgoing.messages(memory)
        incoming = self._incoming(stage, outgoing)
        yield from self._swap(stage, outgoing, incoming, 0)
        return incoming

    def _send_means(self, stage: Stage, means: torch.Tensor) -> Exchange:
        """Send this rank's means to the row, and receive the others'."""
        messages = stage.means.messages(means)
        yield from self._swap(stage, [messages[stage.position]] * len(messages), messages, 1)

    def _deliver(
        self, stage: Stage, delivery: Delivery, sums: torch.Tensor, length: int
    ) -> Parts[list[torch.Tensor]]:
        """Send each sum to the rank whose shard it is, and return what all hosts have sent this one."""
        me, layout = stage.ranks[stage.position], self.task.plan.formats.scatter
        size, count = layout.message_bytes(length), len(delivery.receivers)
        outgoing = torch.split(self.scratch.take(size * count), size)
        residual = self.task.residual_of(delivery.lost, sums.numel())
        kernels.encode_shards(sums, outgoing, [length] * count, layout, **residual, check=False)
        mine = outgoing[delivery.receivers.index(me)]
        incoming = [mine if rank == me else self.scratch.take(size) for rank in delivery.senders]
        receives = zip(delivery.senders, incoming, strict=True)
        sends = zip(delivery.receivers, outgoing, strict=True)
        yield from self._exchange(
            [(rank, message) for rank, message in receives if rank != me],
            [(rank, message) for rank, message in sends if rank != me],
            (self.number, stage.tag, 1),
        )
        return incoming

    # ---- messages ----

    def _join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return values in one tensor; a single part is not copied."""
        if len(parts) == 1:
            return parts[0]
        joined = self.scratch.take(sum(part.numel() for part in parts), parts[0].dtype)
        return torch.cat(list(parts), out=joined)

    def _incoming(self, stage: Stage, outgoing: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for what every rank sends this one, which keeps its own part."""
        own = outgoing[stage.position]
        return [
            own if position == stage.position else self.scratch.take(own.numel(), own.dtype)
            for position in range(len(stage.ranks))
        ]

    def _swap(
        self, stage: Stage, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor], shot: int
    ) -> Exchange:
        """Exchange with every peer of a row ``outgoing[position]`` for ``incoming[position]``."""
        receives = [(stage.ranks[peer], incoming[peer]) for peer in stage.peers]
        sends = [(stage.ranks[peer], outgoing[peer]) for peer in stage.peers]
        return self._exchange(receives, sends, (self.number, stage.tag, shot))

    def _exchange(
        self,
        receives: Sequence[tuple[int, torch.Tensor]],
        sends: Sequence[tuple[int, torch.Tensor]],
        tag: tuple[int, ...],
    ) -> Exchange:
        """Start messages, pause, and wait for them."""
        tag_of_all = hash((*tag, self.task.label))
        works = start_messages(self.group, receives=receives, sends=sends, tag=tag_of_all)
        yield

        for work in works:
            work.wait()
