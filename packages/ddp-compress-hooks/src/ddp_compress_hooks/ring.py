"""Average by the backend's own all-reduce: a ring that sums in the wire dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_compress_hooks.payload import Piece, pieces
from ddp_compress_hooks.state import CompressState
from dist_utils.finite_means import largest_share
from dist_utils.process_groups import future_of_work

__all__ = ["average", "average_sparse", "when_all_have"]

_PIECE_BYTES_PER_RANK = 2 << 20
"""Wire bytes of a piece, times the number of ranks. While one piece is on the wire the next is cast, but
every piece costs a round of messages over the ring, and a long ring overlaps by itself. For 25 MiB buckets
this gives five pieces on two ranks and three on four: the most that did not lose to PyTorch's hook on
loopback, where every message costs time on a core that the ranks share. Four pieces on four ranks would gain
4 % on 1 Gbit/s links and lose 7 % on loopback."""


def average(
    state: CompressState,
    group: dist.ProcessGroup,
    buffer: torch.Tensor,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
) -> torch.futures.Future[torch.Tensor]:
    """Average ``values``, a flat view of ``buffer``, piece by piece; the future's value is ``buffer``.

    While a piece is on the wire the next one is encoded; each is decoded when it arrives.
    """
    world_size = group.size()
    clamp = state.clamp(largest_share(wire_dtype, world_size))
    # Without a cast there is nothing to overlap with the wire.
    nothing_to_cast = wire_dtype == values.dtype
    most_bytes = world_size * _PIECE_BYTES_PER_RANK
    parts = [Piece(values, wire_dtype)] if nothing_to_cast else pieces(values, wire_dtype, most_bytes)
    arrivals = []
    for piece in parts:
        piece.encode(world_size, clamp)
        work: Any = dist.all_reduce(piece.payload, group=group, async_op=True)

        def arrive(done: torch.futures.Future[Any], piece: Piece = piece) -> torch.Tensor:
            done.value()  # raises the collective's error
            piece.decode()
            return buffer

        arrivals.append(future_of_work(work, group, values.device).then(arrive))
    return arrivals[0] if len(arrivals) == 1 else when_all_have(arrivals)


def average_sparse(group: dist.ProcessGroup, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse ``buffer`` without compression; the future's value is a new tensor.

    Nothing is written in place, because the values of an embedding's gradient may share memory with the
    gradient that flows on to other layers.
    """
    # Coalesced as the backend would: a share is the sum of all entries with one index.
    shares = (buffer / group.size()).coalesce()
    work: Any = dist.all_reduce(shares, group=group, async_op=True)
    arrival = future_of_work(work, group, buffer.device)
    reduced: torch.futures.Future[torch.Tensor] = arrival.then(lambda done: done.value()[0])
    return reduced


def when_all_have(
    arrivals: list[torch.futures.Future[torch.Tensor]],
) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the last of ``arrivals``, complete when all are; or of the first error."""

    def last(done: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]]) -> torch.Tensor:
        return [arrival.value() for arrival in done.value()][-1]

    return torch.futures.collect_all(arrivals).then(last)
