"""How one chunk is averaged: encoded, sent, reduced, sent, decoded, with a pause wherever it would wait.

An exchange is a generator. It yields after it has started to send, and processes what has arrived when it is
resumed; meanwhile other chunks are computed and sent (see :func:`take_turns`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.chunks import Span, shard_lengths, shards
from ddp_quant_hooks.link import Link
from ddp_quant_hooks.residuals import Residual
from ddp_quant_hooks.scratch import Scratch
from ddp_quant_hooks.wire_format import Layout
from dist_utils.comm_hooks import clamp_mean
from dist_utils.process_groups import Arrival

__all__ = [
    "Exchange",
    "Wire",
    "average_inside",
    "average_quantized",
    "report_not_finite",
    "take_turns",
    "wait_for",
]

Exchange = Iterator[None]

_LAG = 1
"""How many chunks are started between two turns of a chunk."""


@dataclass(frozen=True)
class Wire:
    """How values are sent, and where their rounding errors are kept.

    Attributes:
        links: The connections to the ranks that average: in this rank's row and, in levels, between rows.
        scatter: The format of messages to a shard's owner (and of all messages between two ranks).
        gather: The format of messages from a shard's owner.
        own: Rounding errors of this rank's own values.
        shard: Rounding errors of the means of this rank's shards, of each level in turn.
        failed: Called for each chunk with a flag, whether a value of its mean is not finite; ``None`` if that
            is not needed.
    """

    links: Sequence[Link]
    scatter: Layout
    gather: Layout
    own: Residual
    shard: Residual
    failed: Callable[[torch.Tensor], None] | None

    @property
    def link(self) -> Link:
        """The connection to the ranks of the first level; to all ranks if there is one level."""
        return self.links[0]

    @property
    def bytes_sent(self) -> int:
        """The bytes that were sent so far."""
        return sum(link.bytes_sent for link in self.links)


def take_turns(
    exchanges: Iterable[Callable[[Scratch], Exchange]], scratches: list[Scratch], device: torch.device
) -> None:
    """Run exchanges as in a pipeline: each is resumed :data:`_LAG` starts after its last turn.

    The next one is started before older ones are resumed, so that the network is busy while they compute. All
    ranks do the same in the same order.

    Args:
        exchanges: Functions that start an exchange with the given scratch.
        scratches: Unused ones; the list grows to as many as are needed at a time.
        device: The device of the scratches.
    """
    waiting = iter(exchanges)
    running: deque[tuple[Exchange, Scratch, int]] = deque()
    for turn in count():
        start = next(waiting, None)
        if start is None and not running:
            return
        due = [running.popleft() for _ in range(len(running)) if running[0][2] <= turn]
        if start is not None:
            scratch = scratches.pop() if scratches else Scratch(device)
            scratch.start_over()
            due.insert(0, (start(scratch), scratch, turn))
        for exchange, scratch, _ in due:
            if next(exchange, exchange) is exchange:  # it has ended
                scratches.append(scratch)
            else:
                running.append((exchange, scratch, turn + _LAG))


def average_quantized(
    scratch: Scratch, *, values: torch.Tensor, wire: Wire, index: int, own_start: int, shard_start: int
) -> Exchange:
    """Average a flat chunk in place.

    Two ranks send each other all values (one shot): as many bytes as through an owner, and rounded once.
    Among more ranks each one averages one shard, and all get all averages (two shots): 2 (W - 1) / W of the
    chunk. With levels, ranks send the same number of bytes in fewer messages, and the averages of a row are
    rounded once more on the way to the other rows.

    Args:
        scratch: Memory for messages.
        values: The chunk.
        wire: The format in which it is sent.
        index: The index of the chunk, identical on all ranks.
        own_start: Where the chunk's residual starts.
        shard_start: Where the residual of this rank's shard of the chunk starts.
    """
    exchange = _one_shot if len(wire.links) == 1 and wire.link.size <= 2 else _two_shot
    yield from exchange(values, wire, scratch, index, own_start, shard_start)


def _one_shot(
    values: torch.Tensor, wire: Wire, scratch: Scratch, index: int, own_start: int, _: int
) -> Exchange:
    link, layout, length = wire.link, wire.scatter, values.numel()
    messages = [scratch.take(layout.message_bytes(length)) for _ in range(link.size)]
    mine = messages[link.index]
    _encode(values, [mine], layout, wire.own, own_start)
    works = link.exchange([mine] * link.size, messages, tag=2 * index)
    yield

    wait_for(works)
    report_not_finite(wire, messages, layout, [length] * link.size)
    kernels.decode(messages, layout, values)


def _two_shot(
    values: torch.Tensor, wire: Wire, scratch: Scratch, index: int, own_start: int, shard_start: int
) -> Exchange:
    means, lengths = yield from _messages_of_mean(
        values, wire, wire.links, scratch, 2 * index, (wire.own, own_start), shard_start
    )
    report_not_finite(wire, means, wire.gather, lengths)
    kernels.decode_shards(means, wire.gather, values)


def _messages_of_mean(
    values: torch.Tensor,
    wire: Wire,
    links: Sequence[Link],
    scratch: Scratch,
    tag: int,
    lost: tuple[Residual, int],
    shard_start: int,
) -> Generator[None, None, tuple[list[torch.Tensor], list[int]]]:
    """Average over all ranks of ``links``; return a message of each shard's mean, and the shards' lengths.

    A rank averages its shard in its row. With further levels, that mean is averaged like values of its own,
    over the ``links`` after the first; the resulting bits are forwarded to all ranks as they are.

    Args:
        values: Values of this rank, or means of its row.
        wire: The format in which they are sent.
        links: To the rows that are not averaged yet.
        scratch: Memory for messages.
        tag: The tag of the first messages; the next number is the tag of the answers.
        lost: The residual of ``values``, and where it begins.
        shard_start: Where the residual of their means begins.
    """
    link, *between = links
    scatter, gather = wire.scatter, wire.gather
    lengths = shard_lengths(values.numel(), link.size, scatter.block_size)
    outgoing = [scratch.take(scatter.message_bytes(length)) for length in lengths]
    own_length = lengths[link.index]
    incoming = [scratch.take(scatter.message_bytes(own_length)) for _ in range(link.size)]
    incoming[link.index] = outgoing[link.index]
    _encode(values, outgoing, scatter, *lost)
    works = link.exchange(outgoing, incoming, tag=tag)
    yield

    wait_for(works)
    # The same memory where it fits: what was sent has arrived, and reduce reads a block before it writes it.
    means = outgoing
    if gather != scatter:
        means = [scratch.take(gather.message_bytes(length)) for length in lengths]
    mine = means[link.index]
    if between:
        mean = scratch.take(own_length, torch.float32)
        kernels.decode(incoming, scatter, mean)
        parts, their_lengths = yield from _messages_of_mean(
            mean, wire, between, scratch, tag, (wire.shard, shard_start), shard_start + own_length
        )
        gather.join(parts, their_lengths, mine)
    else:
        residual, new = wire.shard.span(shard_start, own_length)
        kernels.reduce(incoming, scatter, own_length, mine, gather, residual=residual, new_residual=new)
    works = link.exchange([mine] * link.size, means, tag=tag + 1)
    yield

    wait_for(works)
    return means, lengths


def average_inside(
    scratch: Scratch,
    *,
    values: torch.Tensor,
    link: Link,
    index: int,
    block_size: int,
    between: Callable[..., Exchange],
    failed: Callable[[torch.Tensor], None] | None,
) -> Exchange:
    """Average a flat chunk in full precision inside a node, and each rank's shard of it ``between`` nodes.

    The sum is in fp32, or in the values' own dtype if that is wider. ``between`` is called with the scratch
    and ``values=`` the mean of this rank's shard. ``failed`` as in :class:`Wire`: a rank sees only its own
    shard between nodes, but all must agree on whether a step is finite.
    """
    spans = shards(Span(0, values.numel()), link.size, block_size)
    parts = [values[span.start : span.stop] for span in spans]
    own = parts[link.index]
    incoming = [scratch.take(own.numel(), values.dtype) for _ in range(link.size)]
    works = link.exchange(parts, incoming, tag=2 * index)
    yield

    wait_for(works)
    incoming[link.index] = own
    precision = torch.promote_types(values.dtype, torch.float32)
    mean = scratch.take(own.numel(), precision).zero_()
    for part in incoming:  # divided first: a sum of finite values may not be finite
        mean += part.to(precision) / link.size
    yield from between(scratch, values=mean)
    own.copy_(clamp_mean(mean, own.dtype))  # with a residual it may be larger than any value was
    works = link.exchange([own] * link.size, parts, tag=2 * index + 1)
    yield

    wait_for(works)
    if failed is not None:
        failed(~values.isfinite().all())


def _encode(
    values: torch.Tensor, messages: list[torch.Tensor], layout: Layout, kept: Residual, start: int
) -> None:
    residual, new_residual = kept.span(start, values.numel())
    kernels.encode_shards(values, messages, layout, residual=residual, new_residual=new_residual)


def report_not_finite(
    wire: Wire, messages: Sequence[torch.Tensor], layout: Layout, lengths: Sequence[int]
) -> None:
    """Report whether a value of the messages is not finite, if that is needed."""
    if wire.failed is not None:
        flags = [
            layout.scales(message, length).isnan().any()
            for message, length in zip(messages, lengths, strict=True)
        ]
        wire.failed(torch.stack(flags).any())


def wait_for(works: Sequence[Arrival]) -> None:
    """Return when all messages have arrived."""
    for work in works:
        work.wait()
