"""Follow a plan: chunks are encoded, sent, averaged, sent back and decoded, several of them at a time.

The exchange of a chunk is a generator. It yields after it has started to send, and processes what has arrived
when it is resumed; meanwhile other chunks are computed and sent (see :func:`_take_turns`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.plan import Chunk, Delivery, Lost, Plan, Stage, Way
from ddp_quant_hooks.exchange.scratch import Scratch
from ddp_quant_hooks.exchange.values import Exchange, Values
from ddp_quant_hooks.feedback import BucketResiduals
from dist_utils import start_messages
from dist_utils.process_groups import Arrival

__all__ = ["Task", "average", "reduce_scatter"]

_LAG = 1
"""How many chunks are started between two turns of a chunk."""


@dataclass(frozen=True)
class Task:
    """What the exchanges of one bucket have in common.

    Attributes:
        group: The process group whose ranks average.
        plan: Who sends what to whom.
        residuals: Rounding errors of earlier steps, which are added, and of this one.
        not_finite: Called for each chunk with a flag, whether a value of its mean is not finite; ``None`` if
            that is not needed.
        label: What the messages are about; identical on all ranks. On Gloo, ranks with different labels wait
            for each other until the timeout.
    """

    group: dist.ProcessGroup
    plan: Plan
    residuals: BucketResiduals
    not_finite: Callable[[torch.Tensor], None] | None = None
    label: int = 0

    def residual(self, lost: Lost | None, length: int) -> dict[str, torch.Tensor | None]:
        """Return the residuals of some values, for the kernels."""
        if lost is None:
            return {}
        kept = self.residuals.shard if lost.of_means else self.residuals.own
        residual, new_residual = kept.span(lost.start, length)
        return {"residual": residual, "new_residual": new_residual}


def average(task: Task, values: Values, scratches: list[Scratch]) -> None:
    """Average ``values`` in place; all ranks end with the same bits.

    Args:
        task: Of the bucket.
        values: All of the bucket.
        scratches: Unused ones; the list grows to as many as are needed at a time.
    """

    def exchange(index: int, chunk: Chunk, scratch: Scratch) -> Exchange:
        return values.exchanged(
            chunk.span, scratch, lambda part: _average_chunk(task, chunk.stage, part, scratch, index)
        )

    _take_turns(task.plan, exchange, scratches, values.device)


def reduce_scatter(task: Task, shards: torch.Tensor, mean: torch.Tensor, scratches: list[Scratch]) -> None:
    """Average every rank's shard on that rank.

    Args:
        task: Of the call.
        shards: This rank's values for all ranks, flat, one shard of equal length after another.
        mean: The output for the mean of this rank's shard; flat.
        scratches: As for :func:`average`.
    """
    rows = shards.view(-1, mean.numel())

    def exchange(index: int, chunk: Chunk, scratch: Scratch) -> Exchange:
        part = slice(chunk.span.start, chunk.span.stop)
        return _reduce_scatter_chunk(task, chunk, rows[:, part], mean[part], scratch, index)

    _take_turns(task.plan, exchange, scratches, mean.device)


def _take_turns(
    plan: Plan,
    exchange: Callable[[int, Chunk, Scratch], Exchange],
    scratches: list[Scratch],
    device: torch.device,
) -> None:
    """Run the exchanges of all chunks as in a pipeline: each goes on :data:`_LAG` starts after its last turn.

    The next one is started before older ones are resumed, so that the network is busy while they compute. All
    ranks do the same in the same order.
    """
    waiting = iter(enumerate(plan.chunks))
    running: deque[tuple[Exchange, Scratch, int]] = deque()
    for turn in count():
        started = next(waiting, None)
        if started is None and not running:
            return
        due = [running.popleft() for _ in range(len(running)) if running[0][2] <= turn]
        if started is not None:
            scratch = scratches.pop() if scratches else Scratch(device)
            scratch.start_over()
            due.insert(0, (exchange(*started, scratch), scratch, turn))
        for one, scratch, _ in due:
            if _resume(one):
                running.append((one, scratch, turn + _LAG))
            else:
                scratches.append(scratch)


def _resume(exchange: Exchange) -> bool:
    """Let an exchange go on, and return whether it waits again."""
    return next(exchange, exchange) is not exchange


def _average_chunk(task: Task, stage: Stage, values: torch.Tensor, scratch: Scratch, index: int) -> Exchange:
    """Average a flat chunk in place: all ranks decode the same messages of its mean."""
    answers = scratch.take(stage.answers.total)
    yield from _answer(task, stage, values, answers, scratch, index)
    messages: list[Sequence[torch.Tensor]] = []
    lengths: list[int] = []
    for shard, pieces in zip(stage.answers.shards(answers), stage.pieces, strict=True):
        lengths += pieces
        copies = [length for length in pieces for _ in range(stage.copies)]
        parts = torch.split(shard, [stage.answer.message_bytes(length) for length in copies])
        messages += [parts[first : first + stage.copies] for first in range(0, len(parts), stage.copies)]
    if task.not_finite is not None:
        flat = [message for of_piece in messages for message in of_piece]
        of_each = [length for length in lengths for _ in range(stage.copies)]
        task.not_finite(kernels.not_finite(flat, of_each, stage.answer))
    kernels.decode_shards(messages, lengths, stage.answer, values)
    _enlarge(values, task.plan.enlarge)


def _answer(
    task: Task, stage: Stage, values: torch.Tensor, answers: torch.Tensor, scratch: Scratch, index: int
) -> Exchange:
    """Fill ``answers`` with messages of the mean of ``values``, the same on all ranks of the row."""
    if not values.numel():  # on no rank of the row; the others still expect to take turns
        for _ in range(stage.turns):
            yield
        return
    mine = stage.answers.messages(answers)[stage.place]
    if stage.way is Way.ONE_SHOT:
        messages = answers.view(2, -1).unbind()
        own, layout = messages[stage.place], task.plan.formats.scatter
        residual = task.residual(stage.lost, values.numel())
        kernels.encode_shards(values, [own], stage.lengths, layout, **residual)
        works = _start(task, stage, [own] * 2, messages, (index, stage.tag, 0))
        yield

        _wait_for(works)
        return
    if stage.way is Way.TWO_SHOT:
        incoming = yield from _scatter_few_bits(task, stage, values, scratch, index)
        length, formats = stage.lengths[stage.place], task.plan.formats
        residual = task.residual(stage.lost_mean, length)
        kernels.reduce(incoming, formats.scatter, length, mine, formats.gather, **residual)
    else:
        sums = yield from _sums(task, stage, values, scratch, index)
        parts = torch.split(sums, [stage.lengths[shard] for shard in stage.owned])
        blocks = stage.answers.shards(answers)
        yield from _together(
            _answer(task, further, part, blocks[shard], scratch, index)
            for shard, further, part in zip(stage.owned, stage.further, parts, strict=True)
        )
    works = _start(
        task, stage, [mine] * len(stage.ranks), stage.answers.messages(answers), (index, stage.tag, 1)
    )
    yield

    _wait_for(works)


def _sums(
    task: Task, stage: Stage, values: torch.Tensor, scratch: Scratch, index: int
) -> Generator[None, None, torch.Tensor]:
    """Return, in fp32, what the row contributes to the means of the shards that this rank owns."""
    lengths = [stage.lengths[shard] for shard in stage.owned]
    if stage.way is Way.FEW_BITS:
        incoming = yield from _scatter_few_bits(task, stage, values, scratch, index)
        sums = scratch.take(sum(lengths), torch.float32)
        layout = task.plan.formats.scatter
        sizes = [layout.message_bytes(length) for length in lengths]
        of_ranks = [torch.split(message, sizes) for message in incoming]
        kernels.decode_shards([*zip(*of_ranks, strict=True)], lengths, layout, sums)
        if stage.factor != 1:
            sums *= stage.factor
        return sums
    parts = torch.split(values, list(stage.lengths))
    outgoing = [
        _joined(
            [parts[shard] for shard, owner in enumerate(stage.outgoing.owners) if owner == place], scratch
        )
        for place in range(len(stage.ranks))
    ]
    incoming = [scratch.take(sum(lengths), values.dtype) for _ in stage.ranks]
    incoming[stage.place] = outgoing[stage.place]
    works = _start(task, stage, outgoing, incoming, (index, stage.tag, 0))
    yield

    _wait_for(works)
    sums = scratch.take(sum(lengths), torch.float32).zero_()
    # Made smaller first, as a sum of finite values may not be finite; by a power of two, which rounds nothing
    # but subnormal numbers.
    scale = 2.0 ** -math.ceil(math.log2(len(incoming)))
    for part in incoming:
        sums.add_(part, alpha=scale)
    if stage.factor != scale:
        sums *= stage.factor / scale
    return sums


def _scatter_few_bits(
    task: Task, stage: Stage, values: torch.Tensor, scratch: Scratch, index: int
) -> Generator[None, None, Sequence[torch.Tensor]]:
    """Send each owner its shards, and return every rank's messages of the shards that this rank owns."""
    memory = scratch.take(stage.outgoing.total)
    kernels.encode_shards(
        values,
        stage.outgoing.shards(memory),
        stage.lengths,
        task.plan.formats.scatter,
        **task.residual(stage.lost, values.numel()),
    )
    outgoing = stage.outgoing.messages(memory)
    own = outgoing[stage.place]
    incoming = [scratch.take(own.numel()) for _ in stage.ranks]
    incoming[stage.place] = own
    works = _start(task, stage, outgoing, incoming, (index, stage.tag, 0))
    yield

    _wait_for(works)
    return incoming


def _reduce_scatter_chunk(
    task: Task, chunk: Chunk, parts: torch.Tensor, mean: torch.Tensor, scratch: Scratch, index: int
) -> Exchange:
    """Average all ranks' values for this rank's shard."""
    stage, delivery, layout = chunk.stage, chunk.delivery, task.plan.formats.scatter
    values = parts.view(-1) if parts.is_contiguous() else _joined(list(parts), scratch)
    if delivery is None:
        incoming = yield from _scatter_few_bits(task, stage, values, scratch, index)
    else:
        sums = yield from _sums(task, stage, values, scratch, index)
        incoming = yield from _deliver(task, delivery, sums, mean.numel(), scratch, (index, stage.tag, 1))
    if task.not_finite is not None:
        task.not_finite(kernels.not_finite(incoming, [mean.numel()] * len(incoming), layout))
    kernels.decode(incoming, layout, mean)
    _enlarge(mean, task.plan.enlarge)


def _deliver(
    task: Task,
    delivery: Delivery,
    sums: torch.Tensor,
    length: int,
    scratch: Scratch,
    tag: tuple[int, ...],
) -> Generator[None, None, Sequence[torch.Tensor]]:
    """Send each sum to the rank whose shard it is, and return what all hosts have sent this one."""
    me, layout = task.group.rank(), task.plan.formats.scatter
    size, count = layout.message_bytes(length), len(delivery.receivers)
    outgoing = torch.split(scratch.take(size * count), size)
    residual = task.residual(delivery.lost, sums.numel())
    kernels.encode_shards(sums, outgoing, [length] * count, layout, **residual)
    mine = outgoing[delivery.receivers.index(me)]
    incoming = [mine if rank == me else scratch.take(size) for rank in delivery.senders]
    works = start_messages(
        task.group,
        receives=[
            (rank, message) for rank, message in zip(delivery.senders, incoming, strict=True) if rank != me
        ],
        sends=[
            (rank, message) for rank, message in zip(delivery.receivers, outgoing, strict=True) if rank != me
        ],
        tag=hash((*tag, task.label)),
    )
    yield

    _wait_for(works)
    return incoming


def _enlarge(means: torch.Tensor, factor: float) -> None:
    """Multiply finite means, which stay finite."""
    if factor != 1:
        largest = torch.finfo(means.dtype).max
        means.mul_(factor).clamp_(-largest, largest)


def _together(exchanges: Iterable[Exchange]) -> Exchange:
    """Run exchanges side by side: all send, then all wait."""
    running = list(exchanges)
    while running := [one for one in running if _resume(one)]:
        yield


def _wait_for(works: Sequence[Arrival]) -> None:
    for work in works:
        work.wait()


def _joined(parts: Sequence[torch.Tensor], scratch: Scratch) -> torch.Tensor:
    """Return values in one tensor; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    joined = scratch.take(sum(part.numel() for part in parts), parts[0].dtype)
    return torch.cat(list(parts), out=joined)


def _start(
    task: Task,
    stage: Stage,
    outgoing: Sequence[torch.Tensor],
    incoming: Sequence[torch.Tensor],
    tag: tuple[int, ...],
) -> Sequence[Arrival]:
    """Start to send ``outgoing[place]`` to, and to receive ``incoming[place]`` from, every peer of a row."""
    return start_messages(
        task.group,
        receives=[(stage.ranks[peer], incoming[peer]) for peer in stage.peers],
        sends=[(stage.ranks[peer], outgoing[peer]) for peer in stage.peers],
        tag=hash((*tag, task.label)),
    )
