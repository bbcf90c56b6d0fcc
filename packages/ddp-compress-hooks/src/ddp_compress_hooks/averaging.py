"""Sum or average flat values over a group: divide, cast, sum on the way, and cast back.

``all_reduce_sum`` lets the backend sum in the wire dtype. ``exchange_sum`` sums in fp32: every rank sums
one shard, then all exchange the sums. Both send ``2 (W - 1) / W`` times the values in the wire dtype, and
work on pieces, of which one is on the wire while the next is cast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_compress_hooks.state import Clamp, CompressState
from dist_utils import start_messages
from dist_utils.comm_hooks import clamp_mean, joined_future
from dist_utils.process_groups import Arrival, future_of_work

_RING_PIECE_BYTES_PER_RANK = 2 << 20
"""Wire bytes of a piece, times the number of ranks: every piece costs a round of messages over the ring, and
a long ring overlaps by itself. For 25 MiB buckets this gives five pieces on two ranks and three on four: the
most that did not lose to PyTorch's hook on loopback, where every message costs time on a core that the ranks
share."""

_EXCHANGE_PIECE_BYTES = 5 << 20
"""Wire bytes of a piece of an exchange: four pieces of a 25 MiB bucket. Three to five were equal within the
noise on 1 Gbit/s links; five were slower on loopback."""


def start_sum(
    state: CompressState,
    buffer: torch.Tensor,
    wire_dtype: torch.dtype | None,
    *,
    divisor: int,
    name: str,
    tag: int = 0,
) -> torch.futures.Future[torch.Tensor]:
    """Start to sum a flat dense buffer in place; the future's value is ``buffer``.

    Args:
        state: The group, and how to sum.
        buffer: Real or complex.
        wire_dtype: The dtype that is sent; ``None``: the buffer's own.
        divisor: Divides values before they are cast: the number of ranks, for a mean.
        name: What a profiler calls the job, if there is one.
        tag: As for :func:`exchange_sum`.
    """
    values = flat_real(buffer)
    wire_dtype = wire_dtype or values.dtype
    if not state.sums_in_fp32(wire_dtype):
        return all_reduce_sum(state, buffer, values, wire_dtype, divisor=divisor)

    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        exchange_sum(state, private_group, values, wire_dtype, divisor=divisor, tag=tag)
        return buffer

    return state.worker.submit(job, device=buffer.device, name=name)


def flat_real(buffer: torch.Tensor) -> torch.Tensor:
    """Return a flat view of a buffer's values; a complex one has two for each element."""
    return (torch.view_as_real(buffer) if buffer.is_complex() else buffer).view(-1)


def all_reduce_sum(
    state: CompressState,
    buffer: torch.Tensor,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
    *,
    divisor: int,
) -> torch.futures.Future[torch.Tensor]:
    """Sum ``values``, a flat view of ``buffer``, divided before, by the backend's all-reduce.

    With a clamp, every rank's share stays below 1/W of the range, so that no partial sum overflows. The
    future's value is ``buffer``.
    """
    group = state.process_group
    # Without a cast there is nothing to overlap with the wire.
    most_bytes = values.nbytes if wire_dtype == values.dtype else group.size() * _RING_PIECE_BYTES_PER_RANK
    arrivals = []
    for piece in _pieces(values, wire_dtype, most_bytes):
        payload = encode(state, piece, wire_dtype, divisor=divisor)
        work: Any = dist.all_reduce(payload, group=group, async_op=True)

        def decode(
            done: torch.futures.Future[Any], piece: torch.Tensor = piece, payload: torch.Tensor = payload
        ) -> torch.Tensor:
            done.value()  # raises the collective's error
            if payload is not piece:
                piece.copy_(clamp_mean(payload, piece.dtype))
            return buffer

        arrivals.append(future_of_work(work, group, values.device).then(decode))
    return arrivals[0] if len(arrivals) == 1 else joined_future(arrivals, buffer, buffer.device)


def exchange_sum(
    state: CompressState,
    group: dist.ProcessGroup,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
    *,
    divisor: int,
    tag: int = 0,
) -> None:
    """Sum flat ``values`` in place, divided before, with sums in fp32; every rank ends with the same bits.

    A job for an OrderedWorker: two hops of messages where a ring has 2 (W - 1).

    Args:
        state: How to sum.
        group: The ranks.
        values: A flat tensor.
        wire_dtype: The dtype that is sent.
        divisor: As for :func:`encode`.
        tag: Even; tells the messages of one kind of call from those of another.
    """
    exchanges = [
        _exchange(state, group, piece, wire_dtype, divisor, tag + 2 * index)
        for index, piece in enumerate(_pieces(values, wire_dtype, _EXCHANGE_PIECE_BYTES))
    ]
    while exchanges:  # one step of every piece: the first waits while the next are on the wire
        exchanges = [exchange for exchange in exchanges if next(exchange, "over") is None]


def _exchange(
    state: CompressState,
    group: dist.ProcessGroup,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
    divisor: int,
    tag: int,
) -> Iterator[None]:
    """Sum one piece; pause whenever its messages are under way."""
    payload = encode(state, values, wire_dtype, divisor=divisor)
    shards = payload.tensor_split(group.size())
    own = shards[group.rank()]
    peers = [(group.rank() + step) % group.size() for step in range(1, group.size())]
    shares = [(peer, torch.empty_like(own)) for peer in peers]  # of this rank's shard
    to_peers = [(peer, shards[peer]) for peer in peers]
    arrivals = start_messages(group, receives=shares, sends=to_peers, tag=tag)
    yield
    _wait(arrivals)
    _add(own, [share for _, share in shares], state.clamp)
    del shares  # their memory serves other pieces while the sums are under way
    sums = [(peer, own) for peer in peers]
    arrivals = start_messages(group, receives=to_peers, sends=sums, tag=tag + 1)
    yield
    _wait(arrivals)
    if payload is not values:
        values.copy_(clamp_mean(payload, values.dtype))


def _add(own: torch.Tensor, shares: Sequence[torch.Tensor], clamp: Clamp | None) -> None:
    """Add the shares of other ranks to this one's in fp32, and round once."""
    total = own.float()
    for share in shares:
        total += share
    own.copy_(total if clamp is None else clamp(total, torch.finfo(own.dtype).max))


def _wait(arrivals: Sequence[Arrival]) -> None:
    for arrival in arrivals:
        arrival.wait()


def encode(
    state: CompressState, values: torch.Tensor, wire_dtype: torch.dtype, *, divisor: int
) -> torch.Tensor:
    """Return this rank's share of the sum: divided in full precision, clamped if wanted, then cast.

    Args:
        state: How to sum.
        values: Divided in place, and their own share if they have the wire dtype.
        wire_dtype: The dtype of the share.
        divisor: The number of ranks, for a mean; 1 for a sum.
    """
    precision = torch.promote_types(values.dtype, wire_dtype)
    payload = values if wire_dtype == values.dtype else torch.empty_like(values, dtype=wire_dtype)
    share = values if precision == values.dtype else values.to(precision)
    if divisor != 1:
        share = share.div_(divisor)
    if state.clamp is None:
        return payload.copy_(share)
    world_size = state.process_group.size()
    fits = state.sums_in_fp32(wire_dtype) and fits_in_fp32(wire_dtype, world_size)
    limit = torch.finfo(wire_dtype).max if fits else largest_share(wire_dtype, world_size)
    return payload.copy_(state.clamp(share, limit))


def fits_in_fp32(dtype: torch.dtype, world_size: int) -> bool:
    """Return whether the sum of so many of the largest numbers of ``dtype`` is finite in fp32."""
    return torch.finfo(dtype).max * world_size <= torch.finfo(torch.float32).max


def largest_share(dtype: torch.dtype, world_size: int) -> float:
    """Return a value of ``dtype`` such that ``world_size`` copies of it have a finite sum, in any order.

    ``finfo(dtype).max / world_size`` for powers of two; otherwise at least half of it.
    """
    limits = torch.finfo(dtype)
    steps = 2 / limits.eps - 1  # the largest number, in units of the largest step between neighbors
    # Partial sums of multiples of that step are exact.
    multiple = limits.max / steps * (steps // world_size)
    # A partial sum of k < 2^j copies of max / 2^j rounds to at most k 2^-j of the range, less one step.
    power = limits.max / float(1 << (world_size - 1).bit_length())
    return max(multiple, power)


def _pieces(values: torch.Tensor, wire_dtype: torch.dtype, most_bytes: int) -> tuple[torch.Tensor, ...]:
    """Cut flat ``values`` into pieces of at most ``most_bytes`` on the wire, the same on every rank.

    The first and the last are half as long as the others: the wire idles while the first is encoded and
    while the last is decoded. On other devices there is one piece, because a stream overlaps by itself.
    """
    count = -(-values.numel() * wire_dtype.itemsize // max(most_bytes, 1))
    if count <= 1 or values.device.type != "cpu":
        return (values,)
    cuts = [(2 * index + 1) * values.numel() // (2 * count) for index in range(count)]
    return values.tensor_split(cuts)
