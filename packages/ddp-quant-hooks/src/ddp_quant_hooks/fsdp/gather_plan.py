"""How a module's shards are gathered: what a shard is on the wire, and which way messages take."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain

import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.plan import Span
from ddp_quant_hooks.kernels import Layout
from ddp_quant_hooks.kernels.layout import ALIGNMENT
from dist_utils.process_groups import Arrival

_MOST_PLANS = 1 << 12


@dataclass(frozen=True)
class ShardFormat:
    """What the shard of a module is on the wire: a message of its few bits, then its exact values.

    Exact values are in both parts. That keeps a rank's values in one piece, which a kernel takes as it is.

    Attributes:
        layout: Of values in few bits.
        lengths: How many values of each parameter the shard has.
        runs: How many values there are in each run of neighboring parameters whose blocks begin anew.
        exact: Where the exact values are in the shard.
        value_bytes: The size of an exact value.
        note_bytes: The size of what follows, for the sender's own use.
    """

    layout: Layout
    lengths: tuple[int, ...]
    runs: tuple[int, ...]
    exact: tuple[Span, ...]
    value_bytes: int
    note_bytes: int = 0

    @cached_property
    def run_bytes(self) -> tuple[int, ...]:
        """The size of the few bits of each run."""
        return tuple(map(self.layout.message_bytes, self.runs))

    @cached_property
    def exact_bytes(self) -> Span:
        """Where the exact values are in a message."""
        start = sum(self.run_bytes)
        return Span(start, start + self.value_bytes * sum(map(len, self.exact)))

    @cached_property
    def message_bytes(self) -> int:
        """The size of a message."""
        return -(-self.exact_bytes.stop // ALIGNMENT) * ALIGNMENT + self.note_bytes

    def note(self, message: torch.Tensor) -> torch.Tensor:
        """Return what follows the values in a message."""
        return message[self.message_bytes - self.note_bytes :]

    def encode(self, shard: torch.Tensor, message: torch.Tensor) -> None:
        """Write the message of a shard."""
        self.encode_runs(shard, message)
        self.encode_exact(shard, message)

    def encode_runs(self, values: torch.Tensor, message: torch.Tensor) -> None:
        """Write the few bits of a message, of the values of a shard or of others in their place."""
        *runs, _ = torch.split(message, [*self.run_bytes, self.message_bytes - sum(self.run_bytes)])
        kernels.encode_shards(values, runs, self.runs, self.layout)

    def encode_exact(self, shard: torch.Tensor, message: torch.Tensor) -> None:
        """Write the exact values of a message."""
        exact = message[self.exact_bytes.start : self.exact_bytes.stop].view(shard.dtype)
        for span, part in zip(self.exact, torch.split(exact, [*map(len, self.exact)]), strict=False):
            part.copy_(shard[span.start : span.stop])

    def decode(self, messages: torch.Tensor, order: tuple[int, ...], shards: torch.Tensor) -> None:
        """Restore the shards of all ranks.

        Args:
            messages: One after another.
            order: The ranks in the order of their messages.
            shards: The output, in the order of ranks.
        """
        self.decode_runs(messages, order, shards)
        self.decode_exact(messages, order, shards)

    def decode_runs(self, messages: torch.Tensor, order: tuple[int, ...], values: torch.Tensor) -> None:
        """Restore what few bits there are of; as :meth:`decode`."""
        ranks, pieces = len(order), [*self.run_bytes, self.message_bytes - sum(self.run_bytes)]
        parts = torch.split(messages, pieces * ranks)
        rows = _inverse(order)
        runs = [[part] for row in rows for part in parts[row * len(pieces) : (row + 1) * len(pieces) - 1]]
        kernels.decode_shards(runs, self.runs * ranks, self.layout, values)

    def decode_exact(self, messages: torch.Tensor, order: tuple[int, ...], shards: torch.Tensor) -> None:
        """Write the exact values over what is there; as :meth:`decode`."""
        if not self.exact:
            return
        ranks, rows = len(order), _inverse(order)
        exact = messages.view(ranks, -1)[:, self.exact_bytes.start : self.exact_bytes.stop]
        if rows != tuple(range(ranks)):
            exact = exact.index_select(0, _on_device(rows, messages.device))
        values, of_ranks = exact.view(shards.dtype), shards.view(ranks, -1)
        for span, part in zip(self.exact, torch.split(values, [*map(len, self.exact)], 1), strict=True):
            of_ranks[:, span.start : span.stop].copy_(part)


@lru_cache(maxsize=_MOST_PLANS)
def shard_format(
    parameters: tuple[tuple[int, bool], ...], layout: Layout, value_bytes: int, note_bytes: int = 0
) -> ShardFormat:
    """Return the format of the shard of a module.

    Args:
        parameters: How many values of each parameter the shard has, and whether they are sent as they are.
        layout: Of values in few bits.
        value_bytes: The size of a value.
        note_bytes: The size of what the sender adds.
    """
    runs: list[int] = []
    for length, _ in parameters:
        if length == 0:
            continue
        if runs and runs[-1] % layout.block_size == 0:  # no block crosses from one parameter into the next
            runs[-1] += length
        else:
            runs.append(length)
    lengths, exact = tuple(length for length, _ in parameters), tuple(join_neighbors(parameters))
    return ShardFormat(layout, lengths, tuple(runs), exact, value_bytes, note_bytes)


def join_neighbors(parameters: Iterable[tuple[int, bool]]) -> list[Span]:
    """Return where some parameters are in a shard, neighbors together.

    Args:
        parameters: How many values of each parameter the shard has, and whether it is one of them.
    """
    spans: list[Span] = []
    stop = 0
    for length, is_one in parameters:
        start, stop = stop, stop + length
        if not is_one or length == 0:
            continue
        if spans and spans[-1].stop == start:
            start = spans.pop().start
        spans.append(Span(start, stop))
    return spans


@dataclass(frozen=True)
class Route:
    """How the messages of all ranks get to one of them, so that each enters every host once.

    A rank sends its message to the others of its host and to one rank of every other host, which hands it on
    to the others there.

    Attributes:
        order: The ranks in the order in which their messages are in memory: those that a rank of the host
            hands on are next to each other.
        receives: The ranks whose messages come from themselves.
        sends: The ranks that get this one's message from it.
        hands_on: Where the messages are in memory, by their number, that this rank hands on.
        handed_on: The other ranks of the host, and where the messages go in memory that they hand on.
    """

    order: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    hands_on: Span
    handed_on: tuple[tuple[int, Span], ...]

    @property
    def inside(self) -> tuple[int, ...]:
        """The other ranks of the host."""
        return tuple(peer for peer, _ in self.handed_on)

    @property
    def entering(self) -> tuple[int, ...]:
        """The ranks of other hosts whose messages come to this one."""
        return self.receives[len(self.handed_on) :]

    @property
    def leaving(self) -> tuple[int, ...]:
        """The ranks of other hosts that get this one's message."""
        return self.sends[len(self.handed_on) :]

    @property
    def messages_sent(self) -> int:
        """How many messages this rank sends, its own and others'."""
        return len(self.sends) + len(self.hands_on) * len(self.handed_on)


@lru_cache(maxsize=_MOST_PLANS)
def plan_route(hosts: tuple[int, ...], rank: int) -> Route:
    """Return the route of a rank's messages.

    Args:
        hosts: For each rank of the group, the number of its host.
        rank: Which one.
    """
    ranks_of: dict[int, list[int]] = {}
    for peer, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(peer)

    def receiver(sender: int, host: int) -> int:
        there = ranks_of[host]
        return there[ranks_of[hosts[sender]].index(sender) % len(there)]

    here, elsewhere = ranks_of[hosts[rank]], [host for host in ranks_of if host != hosts[rank]]
    brought: dict[int, list[int]] = {peer: [] for peer in here}
    for sender, host in enumerate(hosts):
        if host != hosts[rank]:
            brought[receiver(sender, hosts[rank])].append(sender)
    others = [peer for peer in here if peer != rank]
    order = [*here, *chain(*brought.values())] if others else [*range(len(hosts))]
    bounds = accumulate(map(len, brought.values()), initial=len(here))
    spans = {
        peer: Span(start, start + len(brought[peer])) for peer, start in zip(brought, bounds, strict=False)
    }
    return Route(
        tuple(order),
        (*others, *brought[rank]),
        (*others, *(receiver(rank, host) for host in elsewhere)),
        spans[rank] if others else Span(0, 0),
        tuple((peer, spans[peer]) for peer in others),
    )


def message_tags(agreement: str, module: str, *steps: str) -> tuple[int, ...]:
    """Return the tag of each step's messages, unlike those of other modules and senders in FSDP's group.

    They are identical on all ranks. With Gloo, a rank that gathers another module, as it does when it alone
    has caught an error and begun anew, is waited for: its weights are taken for no others of the same size.
    NCCL has no tags: there only notes tell, with differences.

    Args:
        agreement: What the ranks call this use of the module, unlike all others.
        module: The name of the module.
        *steps: The names of the steps.
    """
    return tuple(zlib.crc32(f"{agreement} {module}: {step}".encode()) for step in steps)


def pause_before(works: Sequence[Arrival]) -> Iterator[None]:
    """Pause, and then wait for messages: also if the gather is dropped meanwhile.

    Where a message comes in whose receiver is gone, Gloo reads nothing more from its sender. At the end of
    the program nobody needs that, and peers may be stuck.
    """
    try:
        yield
    finally:
        for work in () if sys.is_finalizing() else works:
            work.wait()


@lru_cache(maxsize=_MOST_PLANS)
def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row of each rank's message."""
    rows = dict(zip(order, range(len(order)), strict=True))
    return tuple(rows[rank] for rank in range(len(order)))


@lru_cache(maxsize=64)
def _on_device(rows: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor, without the time to send them to a device again."""
    with torch.inference_mode(False):
        return torch.tensor(rows, device=device)
