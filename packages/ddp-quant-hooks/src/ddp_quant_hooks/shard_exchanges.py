"""How one chunk of every rank's shard is exchanged: scattered to its owners, or gathered from them.

The two halves of :mod:`ddp_quant_hooks.exchanges`, each on its own, as generators of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchanges import Exchange, Wire, report_not_finite, wait_for
from ddp_quant_hooks.link import Link
from ddp_quant_hooks.scratch import Scratch
from ddp_quant_hooks.wire_format import Layout

__all__ = ["gather_chunk", "reduce_scatter_chunk"]


def reduce_scatter_chunk(
    scratch: Scratch,
    *,
    parts: Sequence[torch.Tensor],
    own_starts: Sequence[int],
    mean: torch.Tensor,
    wire: Wire,
    index: int,
) -> Exchange:
    """Average all ranks' values for this rank's shard.

    Args:
        scratch: Memory for messages.
        parts: This rank's values for each rank's shard.
        own_starts: Where the residual of each of them starts.
        mean: The output for the mean of this rank's shard.
        wire: The format in which values are sent.
        index: The index of the chunk, identical on all ranks.
    """
    link, layout, length = wire.link, wire.scatter, mean.numel()
    outgoing = [scratch.take(layout.message_bytes(length)) for _ in parts]
    incoming = [scratch.take(layout.message_bytes(length)) for _ in parts]
    incoming[link.index] = outgoing[link.index]
    for part, message, start in zip(parts, outgoing, own_starts, strict=True):
        residual, new_residual = wire.own.span(start, length)
        kernels.encode(part, message, layout, residual=residual, new_residual=new_residual)
    works = link.exchange(outgoing, incoming, tag=index)
    yield

    wait_for(works)
    report_not_finite(wire, incoming, layout, [length] * link.size)
    kernels.decode(incoming, layout, mean)


def gather_chunk(
    scratch: Scratch,
    *,
    mine: torch.Tensor,
    parts: Sequence[torch.Tensor],
    layout: Layout,
    link: Link,
    index: int,
) -> Exchange:
    """Give every rank the values of all ranks as they were sent, including its own.

    Args:
        scratch: Memory for messages.
        mine: This rank's values.
        parts: The outputs for the values of each rank.
        layout: The format in which they are sent.
        link: To the ranks.
        index: The index of the chunk, identical on all ranks.
    """
    messages = [scratch.take(layout.message_bytes(mine.numel())) for _ in parts]
    own = messages[link.index]
    kernels.encode(mine, own, layout)
    works = link.exchange([own] * link.size, messages, tag=index)
    yield

    wait_for(works)
    for part, message in zip(parts, messages, strict=True):
        kernels.decode([message], layout, part)
