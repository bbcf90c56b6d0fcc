"""Simulate the schedules of all ranks: which rank waits for which, on which link, and for how long.

Every rank has one thread that computes and starts messages, and one that receives them. Messages queue where
they leave and where they arrive: a node's link to others is shared by its ranks; inside a node each rank has
its own. A message arrives while it is still leaving, so a long one takes its time only once.

All ranks do the same steps, so a step is played for all of them at once, in arrays.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from many_ranks.programs import Messages, Program, Start
from many_ranks.recording import Begin, Compute, Wait

from ddp_quant_hooks.measure.cost_model import Cluster, Machine, Worker

__all__ = ["Ranks", "play"]

Floats = npt.NDArray[np.float64]

_IN_FLIGHT = 3
"""Batches that may be on a link at a time; a later one starts only after the first has arrived."""


@dataclass(frozen=True)
class Ranks:
    """How ranks differ from each other, and what they share.

    Attributes:
        cores: Of the processor, for each rank.
        busy: How many cores a rank's two threads keep busy, between 1 and 2. With fewer, all work takes
            longer.
        late: Seconds after the first by which each rank begins a bucket; ``None``: at once.
        slower: How many times as long each rank's work takes; ``None``: all alike.
        ready: When each bucket is handed over, in seconds.
    """

    cores: float = 2.0
    busy: float = 2.0
    late: Floats | None = None
    slower: Floats | None = None
    ready: tuple[float, ...] = ()


def play(
    program: Program, cluster: Cluster, machine: Machine, worker: Worker, ranks: Ranks | None = None
) -> Floats:
    """Return the seconds until each rank has the mean of each bucket, [bucket, rank].

    Args:
        program: The operations of the ranks.
        cluster: The cluster; ``cluster.gbit`` is the rate of the nodes' links, whatever ``machine`` says.
        machine: Latency and processor.
        worker: The ranks' own work.
        ranks: How the ranks differ.
    """
    ranks = ranks or Ranks()
    late = np.zeros(program.world) if ranks.late is None else ranks.late
    pace = max(1.0, ranks.busy / ranks.cores) * (
        np.ones(program.world) if ranks.slower is None else ranks.slower
    )
    network = _Network(cluster, machine, worker.starting, pace, alike=bool(np.ptp(late) + np.ptp(pace) == 0))
    now, taken_in = late.copy(), np.zeros(program.world)
    arrivals: dict[int, Floats] = {}
    ends: list[Floats] = []
    for step in program.steps:
        if isinstance(step, Begin):
            if step.bucket:
                ends.append(now.copy())
            if step.bucket < len(ranks.ready):
                now = np.maximum(now, late + ranks.ready[step.bucket])
            now += worker.bucket * pace
        elif isinstance(step, Compute):
            now += worker.kernels[step.kernel].seconds(step.values, step.messages) * pace
        elif isinstance(step, Start):
            now, arrived = network.send(step.messages, now)
            taken_in = arrived.taken_in(taken_in)  # at once, beside whatever is computed
            arrivals[step.number] = taken_in
        elif isinstance(step, Wait):
            now = np.maximum(now, arrivals.pop(step.number))
    return np.array([*ends, now])


@dataclass(frozen=True)
class _Arrivals:
    """When the messages of a batch could arrive, and the cost of receiving them.

    Attributes:
        at_best: Per rank: when all are received if nothing else is in the way.
        work: Per rank: seconds for receiving all.
    """

    at_best: Floats
    work: Floats

    def taken_in(self, free: Floats) -> Floats:
        """Return when all are received by threads that are free from ``free`` on."""
        return np.maximum(free + self.work, self.at_best)


class _Network:
    """All links.

    Args:
        cluster: The nodes.
        machine: Their links and processors.
        starting: See :class:`Worker`.
        pace: Per rank: how many times as long the processor's work takes.
        alike: Whether all ranks are equal; then no messages come late.
    """

    def __init__(
        self, cluster: Cluster, machine: Machine, starting: float, pace: Floats, *, alike: bool
    ) -> None:
        self._machine, self._pace = machine, pace
        self._per_node = cluster.ranks_per_node
        self._between = 8e-9 / cluster.gbit
        self._flight = max(0.0, machine.latency - machine.cpu_per_message)
        self._start = starting * machine.cpu_per_message
        self._take = (1 - starting) * machine.cpu_per_message
        world, nodes = cluster.world, cluster.nodes
        window = 0 if alike else _IN_FLIGHT
        self._leaving, self._coming = (
            {True: _Queue(world, window), False: _Queue(nodes, window)} for _ in range(2)
        )

    def send(self, messages: Messages, now: Floats) -> tuple[Floats, _Arrivals]:
        """Return when each rank has started its messages, and when its own arrive."""
        lengths = messages.bytes.astype(np.float64)
        some = lengths > 0
        # Receives are posted first, which is half of the work; the sender copies what it sends.
        half = 0.5 * self._machine.cpu_per_byte
        each = self._pace[:, None] * (some * self._start / 2 + half * lengths)
        posted = now + self._pace * some.sum(1) * self._start / 2
        started = posted[:, None] + np.cumsum(each, axis=1)
        came = self._through_links(messages, started, lengths, some)
        got = _received(lengths, messages)
        work = self._pace[:, None] * ((got > 0) * self._take + half * got)
        if (order := _order(came)) is not None:
            came, work = np.take_along_axis(came, order, 1), np.take_along_axis(work, order, 1)
        total = work.sum(1)
        behind = total[:, None] - (np.cumsum(work, axis=1) - work)
        return started[:, -1], _Arrivals((came + behind).max(1), total)

    def _through_links(
        self, messages: Messages, started: Floats, lengths: Floats, some: npt.NDArray[np.bool_]
    ) -> Floats:
        """Return when each message to a rank has come, [rank, step]; -inf where there is none."""
        nodes = np.arange(len(started)) // self._per_node
        inside = nodes[:, None] == nodes[messages.receivers]
        came = np.full(started.shape, -np.inf)
        for here in (True, False):
            mine = some & (inside == here)
            if not mine.any():
                continue
            per_byte = self._machine.inside if here else self._between
            group = 1 if here else self._per_node
            took = np.where(mine, lengths * per_byte, 0.0)
            ready = np.where(mine, started, -np.inf)
            left = self._leaving[here].serve(ready, took, group)
            reached = _received(np.where(mine, left - took + self._flight, -np.inf), messages)
            ended = self._coming[here].serve(reached, _received(took, messages), group)
            came = np.where(_received(mine, messages), ended, came)
        return came


def _received(of_sent: npt.NDArray, messages: Messages) -> npt.NDArray:
    """Rearrange an array over sent messages into one over received messages."""
    return of_sent[messages.senders, np.arange(of_sent.shape[1])]


class _Queue:
    """Links that carry one message after another, first come, first served.

    Args:
        links: Number of links.
        window: With each new batch, reconsider this many earlier batches: a late message does not delay
            messages that arrive before it, though their batch was started later. 0: none.
    """

    def __init__(self, links: int, window: int) -> None:
        self._free = np.zeros(links)
        self._window = window
        self._last: deque[tuple[Floats, Floats]] = deque()

    def serve(self, ready: Floats, took: Floats, group: int) -> Floats:
        """Return when messages have passed.

        Args:
            ready: When each could start, [rank, step]; -inf where there is none.
            took: Seconds per message.
            group: How many ranks share a link.
        """
        shape, links = ready.shape, len(ready) // group
        ready, took = ready.reshape(links, -1), took.reshape(links, -1)
        before = list(self._last)
        all_ready = np.concatenate([*(one for one, _ in before), ready], axis=1)
        all_took = np.concatenate([*(one for _, one in before), took], axis=1)
        if (order := _order(all_ready)) is None:
            through = _in_turn(all_ready, all_took, self._free)
        else:
            through = np.empty_like(all_ready)
            all_ready, all_took = (np.take_along_axis(one, order, 1) for one in (all_ready, all_took))
            np.put_along_axis(through, order, _in_turn(all_ready, all_took, self._free), 1)
        self._last.append((ready, took))
        if len(self._last) > self._window:
            first_ready, first_took = self._last.popleft()
            width = first_ready.shape[1]
            done = through[:, :width]
            self._free = np.maximum(self._free, np.where(first_took > 0, done, 0.0).max(1))
        return through[:, -ready.shape[1] :].reshape(shape)


def _order(times: Floats) -> npt.NDArray[np.intp] | None:
    """Return the order of times in each row; ``None`` if they are sorted."""
    if (times[:, 1:] >= times[:, :-1]).all():
        return None
    return np.argsort(times, axis=1, kind="stable")


def _in_turn(ready: Floats, took: Floats, free: Floats) -> Floats:
    """Return when each message is done, for messages that queue in this order, [link, place]."""
    total = np.cumsum(took, axis=1)
    begun = np.maximum(np.maximum.accumulate(ready - (total - took), axis=1), free[:, None])
    return begun + total
