"""What an exchange costs on a cluster, from latency, wire and processor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ddp_quant_hooks.chunks import cut
from ddp_quant_hooks.measure.timing import DIRECT, GRID, RING
from ddp_quant_hooks.plans import Levels, chunk_values, plan_levels

__all__ = ["Cluster", "HookCost", "KernelCost", "Machine", "Traffic", "Worker", "traffic"]

_MOST_RANKS = 10**9


@dataclass(frozen=True)
class Cluster:
    """Identical nodes with one link each.

    Attributes:
        world: Number of ranks.
        gbit: Rate of each node's link to the others, in Gbit/s, in each direction.
        ranks_per_node: Number of ranks in a node.
    """

    world: int
    gbit: float
    ranks_per_node: int = 1

    def __post_init__(self) -> None:
        if not 2 <= self.world <= _MOST_RANKS:
            raise ValueError(f"world must be at least 2 and at most {_MOST_RANKS:.0e}, got {self.world}")
        if not 0 < self.gbit < math.inf:
            raise ValueError(f"gbit must be positive and finite, got {self.gbit}")
        if self.ranks_per_node < 1 or self.world % self.ranks_per_node:
            raise ValueError(f"ranks_per_node must divide world, got {self.ranks_per_node} and {self.world}")

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.world // self.ranks_per_node


@dataclass(frozen=True)
class Machine:
    """The properties of a rank and its links.

    Attributes:
        latency: Seconds for a short message.
        cpu_per_message: Processor seconds for one.
        cpu_per_byte: Processor seconds for a byte that is sent, and one received.
        inside: Seconds for a byte from a rank to another one of its node.
        between: Seconds for a byte from a node to another; all ranks of a node share the link.
    """

    latency: float
    cpu_per_message: float
    cpu_per_byte: float
    inside: float
    between: float


@dataclass(frozen=True)
class KernelCost:
    """The time of a kernel.

    Attributes:
        call: Seconds for any call.
        message: Seconds for each message that it reads or writes.
        value: Seconds for each value that it reads; those of several messages count each time.
    """

    call: float
    message: float
    value: float

    def seconds(self, values: int, messages: int) -> float:
        """Return the seconds of a call."""
        return self.call + self.message * messages + self.value * values


@dataclass(frozen=True)
class Worker:
    """The time of a rank's own work, step by step, for schedules that are simulated, not only counted.

    Attributes:
        bucket: Seconds from the handing over of a bucket to the start of its exchange.
        starting: The share of a message's processor time that starting it takes, on the thread that computes;
            the rest runs on another thread.
        kernels: By name.
    """

    bucket: float
    starting: float
    kernels: Mapping[str, KernelCost]


@dataclass(frozen=True)
class Traffic:
    """The traffic of averaging one bucket.

    Attributes:
        rounds: The number of messages that follow one another.
        messages: The number of messages that a rank sends.
        sent: Bytes that a rank sends.
        inside: Bytes that a rank sends to others of its node.
        between: Bytes that a node sends to others.
        in_turns: Whether links inside and between nodes are used one after the other.
    """

    rounds: int
    messages: int
    sent: float
    inside: float
    between: float
    in_turns: bool = False

    def seconds(self, machine: Machine) -> float:
        """Return the seconds of the wire alone."""
        inside, between = self.inside * machine.inside, self.between * machine.between
        return inside + between if self.in_turns else max(inside, between)

    def waiting(self, machine: Machine) -> float:
        """Return the seconds that messages cost regardless of their length."""
        beside = self.messages - self.rounds  # a round's latency includes the work for one message
        return self.rounds * machine.latency + beside * machine.cpu_per_message


def traffic(
    pattern: str, size: float, ratio: float, cluster: Cluster, *, on_streams: bool = False
) -> Traffic:
    """Return the traffic of an average, with messages and levels as the hooks themselves plan them.

    Args:
        pattern: ``"ring"``: each rank sends to the next, so that one rank of a node sends to another node.
            ``"direct"``: each rank sends to every other, in a large group in levels, the first of which stay
            inside nodes if possible; all ranks of a node share its link. ``"grid"``: fp32 inside nodes;
            between them each rank sends only its share.
        size: The size of the bucket, in bytes; fp32.
        ratio: Bytes on the wire for a byte of the bucket; in a grid, between nodes.
        cluster: The cluster.
        on_streams: The host only enqueues, as with an accelerator's own backend.
    """
    world, ranks, nodes = cluster.world, cluster.ranks_per_node, cluster.nodes
    sent = 2 * (world - 1) / world * size * ratio
    if pattern == RING:
        rounds = 2 * (world - 1)
        return Traffic(rounds, rounds, sent, sent if ranks > 1 else 0.0, sent if nodes > 1 else 0.0)
    values = int(size) // 4
    if pattern == DIRECT:
        levels = plan_levels(world, values, ranks)
        shots = 1 if world == 2 else 2
        chunks = len(cut(values, chunk_values(levels, on_streams=on_streams), 1))
        rounds = shots * len(levels.sizes)
        inside = _inside(levels, size * ratio, ranks)
        return Traffic(rounds, shots * chunks * levels.peers, sent, inside, ranks * (sent - inside))
    if pattern != GRID:
        raise ValueError(f"pattern must be one of {RING!r}, {DIRECT!r}, {GRID!r}, got {pattern!r}")
    levels = plan_levels(nodes, -(-values // ranks))
    shots = 1 if nodes == 2 else 2
    chunks = len(cut(values, chunk_values(levels, on_streams=on_streams, others=ranks - 1), 1))
    inside = 2 * (ranks - 1) / ranks * size
    between = 2 * (nodes - 1) / nodes * size * ratio
    rounds = 2 + shots * len(levels.sizes)
    messages = chunks * (2 * (ranks - 1) + shots * levels.peers)
    return Traffic(rounds, messages, inside + between / ranks, inside, between, in_turns=True)


def _inside(levels: Levels, size: float, ranks_per_node: int) -> float:
    """Return how many bytes a rank sends to others of its node, if values take ``size`` bytes on the wire."""
    inside, stride = 0.0, 1
    for ranks in levels.sizes:
        of_node = max(1, min(ranks, ranks_per_node // stride))  # of the row, this rank too
        inside += 2 * (of_node - 1) * size / (stride * ranks)
        stride *= ranks
    return inside


@dataclass(frozen=True)
class HookCost:
    """The costs of a hook apart from wire and messages, fitted to reproduce the measured times.

    An exchange takes ``fixed``, plus what its messages cost regardless of their length, plus the longer of
    the times of wire and processor, plus ``rest`` for each byte of the bucket.

    Attributes:
        pattern: How averages are sent, as in :func:`traffic`.
        ratio: Bytes on the wire for a byte of the bucket; of a grid, between nodes.
        fixed: Seconds regardless of the size.
        work: Seconds of the processor for a byte of the bucket, without sending.
        sending: Seconds of the processor for a byte that is sent.
        rest: Seconds for a byte of the bucket that neither wire nor processor explains; for an accelerator,
            its kernels.
        on_streams: The host only enqueues.
    """

    pattern: str
    ratio: float
    fixed: float
    work: float
    sending: float
    rest: float
    on_streams: bool = False

    def in_grid(self, cluster: Cluster) -> HookCost:
        """Return the costs of a hierarchical hook of these bits: a rank quantizes its share of a node's."""
        ranks = cluster.ranks_per_node
        return replace(self, pattern=GRID, work=self.work / ranks, rest=self.rest / ranks)

    def seconds(self, size: float, cluster: Cluster, machine: Machine) -> float:
        """Return the seconds of averaging ``size`` bytes on a cluster."""
        moved = self.traffic(size, cluster)
        return (
            self.fixed
            + moved.waiting(machine)
            + max(moved.seconds(machine), self.processor(size, moved))
            + self.rest * size
        )

    def traffic(self, size: float, cluster: Cluster) -> Traffic:
        """Return the traffic of averaging ``size`` bytes."""
        return traffic(self.pattern, size, self.ratio, cluster, on_streams=self.on_streams)

    def processor(self, size: float, moved: Traffic) -> float:
        """Return the processor seconds of an average."""
        return self.work * size + self.sending * moved.sent
