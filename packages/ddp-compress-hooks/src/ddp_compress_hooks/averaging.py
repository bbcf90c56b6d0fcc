"""Average flat values over a group: divide, cast, sum on the way, and cast back.

``all_reduce_mean`` lets the backend sum in the wire dtype. ``exchange_mean`` sums in fp32: every rank sums
one shard, then all exchange the sums. Both send ``2 (W - 1) / W`` times the values in the wire dtype, and
work on pieces, of which one is on the wire while the next is cast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from dist_utils import start_messages
from dist_utils.comm_hooks import clamp_mean
from dist_utils.process_groups import Arrival, future_of_work

__all__ = ["Clamp", "all_reduce_mean", "encode", "exchange_mean", "sparse_mean", "when_all_have"]

Clamp: TypeAlias = Callable[[torch.Tensor, float], torch.Tensor]
"""Brings finite values into ``[-limit, limit]``."""

_RING_PIECE_BYTES_PER_RANK = 2 << 20
"""Wire bytes of a piece, times the number of ranks: every piece costs a round of messages over the ring, and
a long ring overlaps by itself. For 25 MiB buckets this gives five pieces on two ranks and three on four: the
most that did not lose to PyTorch's hook on loopback, where every message costs time on a core that the ranks
share."""

_EXCHANGE_PIECE_BYTES = 5 << 20
"""Wire bytes of a piece of an exchange: four pieces of a 25 MiB bucket. Three to five were equal within the
noise on 1 Gbit/s links; five were slower on loopback."""


def all_reduce_mean(
    group: dist.ProcessGroup,
    buffer: torch.Tensor,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
    clamp: Clamp | None,
) -> torch.futures.Future[torch.Tensor]:
    """Average ``values``, a flat view of ``buffer``, by the backend's all-reduce.

    With a clamp, every rank's share stays below 1/W of the range, so that no partial sum overflows. The
    future's value is ``buffer``.
    """
    world_size = group.size()
    limit = largest_share(wire_dtype, world_size)
    # Without a cast there is nothing to overlap with the wire.
    most_bytes = values.nbytes if wire_dtype == values.dtype else world_size * _RING_PIECE_BYTES_PER_RANK
    arrivals = []
    for piece in _pieces(values, wire_dtype, most_bytes):
        payload = encode(piece, world_size, wire_dtype, clamp, limit)
        work: Any = dist.all_reduce(payload, group=group, async_op=True)

        def decode(
            done: torch.futures.Future[Any], piece: torch.Tensor = piece, payload: torch.Tensor = payload
        ) -> torch.Tensor:
            done.value()  # raises the collective's error
            if payload is not piece:
                piece.copy_(clamp_mean(payload, piece.dtype))
            return buffer

        arrivals.append(future_of_work(work, group, values.device).then(decode))
    return when_all_have(arrivals)


def sparse_mean(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Average a sparse gradient without compression; the future's value is a new tensor.

    Nothing is written in place, because the values of an embedding's gradient may share memory with the
    gradient that flows on to other layers.
    """
    work: Any = dist.all_reduce(gradient / group.size(), group=group, async_op=True)
    arrival = future_of_work(work, group, gradient.device)
    mean: torch.futures.Future[torch.Tensor] = arrival.then(lambda done: done.value()[0])
    return mean


def exchange_mean(
    group: dist.ProcessGroup,
    values: torch.Tensor,
    wire_dtype: torch.dtype,
    clamp: Clamp | None,
    *,
    tag: int = 0,
) -> None:
    """Average flat ``values`` in place, with sums in fp32; every rank ends with the same bits.

    A job for an OrderedWorker: two hops of messages where a ring has 2 (W - 1).

    Args:
        group: The ranks.
        values: A flat tensor.
        wire_dtype: The dtype that is sent.
        clamp: Clamps shares and sums, if any.
        tag: Even; tells the messages of one kind of call from those of another.
    """
    exchanges = [
        _Exchange(group, piece, wire_dtype, clamp, tag + 2 * index)
        for index, piece in enumerate(_pieces(values, wire_dtype, _EXCHANGE_PIECE_BYTES))
    ]
    for exchange in exchanges:
        exchange.send_shares()
    for exchange in exchanges:
        exchange.send_sum()
    for exchange in exchanges:
        exchange.finish()


class _Exchange:
    """The exchange of one piece; each step waits for the messages of the one before."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        values: torch.Tensor,
        wire_dtype: torch.dtype,
        clamp: Clamp | None,
        tag: int,
    ) -> None:
        self._group, self._values, self._wire_dtype = group, values, wire_dtype
        self._clamp, self._tag = clamp, tag
        rank, world_size = group.rank(), group.size()
        self._peers = [(rank + step) % world_size for step in range(1, world_size)]
        self._arrivals: list[Arrival] = []

    def send_shares(self) -> None:
        """Send every peer this rank's share of the shard that the peer sums."""
        world_size = self._group.size()
        limit = largest_share_for_fp32_sum(self._wire_dtype, world_size)
        self._payload = encode(self._values, world_size, self._wire_dtype, self._clamp, limit)
        self._shards = self._payload.tensor_split(world_size)
        self._own = self._shards[self._group.rank()]
        self._received = [torch.empty_like(self._own) for _ in self._peers]
        self._arrivals = list(
            start_messages(
                self._group,
                receives=zip(self._peers, self._received, strict=True),
                sends=[(peer, self._shards[peer]) for peer in self._peers],
                tag=self._tag,
            )
        )

    def send_sum(self) -> None:
        """Sum this rank's shard, round once, and send the result to every peer."""
        self._wait()
        total = self._own.float()
        for share in self._received:
            total += share
        if self._clamp is not None:
            total = self._clamp(total, torch.finfo(self._wire_dtype).max)
        self._own.copy_(total)
        self._arrivals = list(
            start_messages(
                self._group,
                receives=[(peer, self._shards[peer]) for peer in self._peers],
                sends=[(peer, self._own) for peer in self._peers],
                tag=self._tag + 1,
            )
        )

    def finish(self) -> None:
        """Take the sums of all shards."""
        self._wait()
        if self._payload is not self._values:
            self._values.copy_(clamp_mean(self._payload, self._values.dtype))

    def _wait(self) -> None:
        for arrival in self._arrivals:
            arrival.wait()


def encode(
    values: torch.Tensor, divisor: int, wire_dtype: torch.dtype, clamp: Clamp | None, limit: float
) -> torch.Tensor:
    """Return this rank's share of the mean: divided in full precision, clamped if wanted, then cast.

    ``values`` themselves are divided if they have the wire dtype.
    """
    precision = torch.promote_types(values.dtype, wire_dtype)
    payload = values if wire_dtype == values.dtype else torch.empty_like(values, dtype=wire_dtype)
    if clamp is None:  # one kernel, no temporary
        return torch.div(values.to(precision), divisor, out=payload)
    return payload.copy_(clamp(values.to(precision) / divisor, limit))


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


def largest_share_for_fp32_sum(dtype: torch.dtype, world_size: int) -> float:
    """Return the largest share that fits ``dtype`` and has a finite sum over all ranks in fp32."""
    largest: float = torch.finfo(dtype).max
    fits = largest * world_size <= torch.finfo(torch.float32).max
    return largest if fits else largest_share(dtype, world_size)


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


def when_all_have(arrivals: list[torch.futures.Future[torch.Tensor]]) -> torch.futures.Future[torch.Tensor]:
    """Return a future of the last of ``arrivals``, complete when all are; or of the first error."""
    if len(arrivals) == 1:
        return arrivals[0]

    def last(done: torch.futures.Future[list[torch.futures.Future[torch.Tensor]]]) -> torch.Tensor:
        return [arrival.value() for arrival in done.value()][-1]

    return torch.futures.collect_all(arrivals).then(last)
