"""Average with 16 bits on the wire and sums in fp32: every rank sums one shard, then all exchange the sums.

The same bytes as a ring all-reduce, 2 (W - 1) / W of the payload, in two hops instead of 2 (W - 1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from ddp_compress_hooks.payload import (
    Clamp,
    Piece,
    block_scratch,
    blocks,
    largest_share_for_fp32_sum,
    pieces,
)
from ddp_compress_hooks.state import CompressState
from dist_utils import start_messages

__all__ = ["average"]

_PIECE_BYTES = 5 << 20
"""Wire bytes of a piece: four pieces of a 25 MiB bucket. Three to five were equal within the noise on
1 Gbit/s links; five were slower on loopback."""


def average(
    state: CompressState, group: dist.ProcessGroup, values: torch.Tensor, wire_dtype: torch.dtype
) -> None:
    """Average flat ``values`` in place. Every rank ends with the same bits.

    A job for an OrderedWorker. One piece is on the wire while its neighbors are cast and summed.
    """
    clamp_share = state.clamp(largest_share_for_fp32_sum(wire_dtype, group.size()))
    clamp_sum = state.clamp(torch.finfo(wire_dtype).max)
    exchanges = [
        _exchange(piece, group, clamp_share, clamp_sum, index)
        for index, piece in enumerate(pieces(values, wire_dtype, _PIECE_BYTES))
    ]
    stages = 3
    for tick in range(len(exchanges) + stages - 1):
        for stage in range(stages):
            if 0 <= tick - stage < len(exchanges):
                next(exchanges[tick - stage], None)


def _exchange(
    piece: Piece, group: dist.ProcessGroup, clamp_share: Clamp | None, clamp_sum: Clamp | None, index: int
) -> Iterator[None]:
    """Average one piece, pausing wherever it would wait for the wire."""
    world_size, rank = group.size(), group.rank()
    shards = piece.payload.tensor_split(world_size)
    own = shards[rank]
    peers = [(rank + step) % world_size for step in range(1, world_size)]
    received = piece.spare(own.numel() * len(peers)).view(len(peers), own.numel()).unbind()

    piece.encode(world_size, clamp_share)
    works = start_messages(
        group,
        receives=zip(peers, received, strict=True),
        sends=[(peer, shards[peer]) for peer in peers],
        tag=2 * index,
    )
    yield

    for work in works:
        work.wait()
    scratch = block_scratch(own, torch.float32)
    for parts in blocks(own, *received):
        total = scratch[: parts[0].numel()].copy_(parts[0])
        for part in parts[1:]:
            total += part
        parts[0].copy_(total if clamp_sum is None else clamp_sum(total))
    works = start_messages(
        group,
        receives=[(peer, shards[peer]) for peer in peers],
        sends=[(peer, own) for peer in peers],
        tag=2 * index + 1,
    )
    yield

    for work in works:
        work.wait()
    piece.decode()
