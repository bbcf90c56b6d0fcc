"""The schedules of all ranks as one program: the same operations with each rank's own peers and lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from many_ranks.recording import Begin, Compute, MakeRoute, Operation, Send, Wait, record

__all__ = ["Messages", "Program", "Start", "Step", "all_ranks"]

_RECORDED_EXACTLY = 32

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Messages:
    """A batch of messages that all ranks start, each with the ranks of its link.

    Attributes:
        members: The ranks of each link, [link, place].
        steps: Distances from sender to receiver in places, in sending order.
        lengths: Bytes, [link, place].
        of_sender: Whether a message has the length of its sender's entry, or of its receiver's.
    """

    members: Ints
    steps: Ints
    lengths: Ints
    of_sender: bool

    @cached_property
    def receivers(self) -> Ints:
        """Return the receiver of each message, [rank, step]."""
        return self._shifted(self.steps)

    @cached_property
    def senders(self) -> Ints:
        """Return the sender of each message, [rank, step]."""
        return self._shifted(-self.steps)

    @cached_property
    def bytes(self) -> Ints:
        """Return the length of each message of a rank, [rank, step]."""
        own = np.empty(self.members.size, dtype=np.int64)
        own[self.members] = self.lengths
        if self.of_sender:
            return np.repeat(own[:, None], len(self.steps), axis=1)
        return own[self.receivers]

    def _shifted(self, steps: Ints) -> Ints:
        links, size = self.members.shape
        places = (np.arange(size)[:, None] + steps) % size
        found = np.empty((links * size, len(steps)), dtype=np.int64)
        found[self.members] = self.members[:, places]
        return found


@dataclass(frozen=True)
class Start:
    """All ranks start a batch; they wait for its ``number``."""

    number: int
    messages: Messages


Step: TypeAlias = Begin | Compute | Start | Wait


@dataclass(frozen=True)
class Program:
    """The operations of all ranks.

    Attributes:
        world: Number of ranks.
        steps: The steps in order.
        recorded: How many ranks were recorded; the others are like them.
    """

    world: int
    steps: list[Step]
    recorded: int = 0

    def followed_by(self, other: Program) -> Program:
        """Return a program for this one's buckets followed by the other's."""
        buckets = sum(isinstance(step, Begin) for step in self.steps)
        first = 1 + max(step.number for step in self.steps if isinstance(step, Start))

        def later(step: Step) -> Step:
            if isinstance(step, Begin):
                return Begin(step.bucket + buckets)
            if isinstance(step, (Start, Wait)):
                return replace(step, number=step.number + first)
            return step

        return Program(
            self.world, [*self.steps, *map(later, other.steps)], max(self.recorded, other.recorded)
        )

    def messages_of(self, rank: int) -> tuple[int, int]:
        """Return how many messages a rank sends, and their total bytes."""
        count = total = 0
        for step in self.steps:
            if isinstance(step, Start):
                lengths = step.messages.bytes[rank]
                count += int((lengths > 0).sum())
                total += int(lengths.sum())
        return count, total


def all_ranks(
    make_route: MakeRoute,
    world: int,
    buckets: Sequence[int],
    *,
    on_host: bool = True,
    exact: bool | None = None,
) -> Program:
    """Return the program of all ranks, from as few recorded ranks as possible.

    The ranks of a link know the same: who takes part, and the lengths of messages. So each link of each batch
    is recorded from one of its ranks. Kernels take as long as on the busiest of these.

    Args:
        make_route: Makes a rank's route.
        world: Number of ranks.
        buckets: The number of values of each bucket.
        on_host: See :func:`~many_ranks.recording.record`.
        exact: Record each link. Otherwise only four ranks are recorded, and lengths may be wrong by a block.
            ``None``: up to :data:`_RECORDED_EXACTLY` ranks.
    """
    schedules: dict[int, list[Operation]] = {}

    def schedule(rank: int) -> list[Operation]:
        if rank not in schedules:
            schedules[rank] = record(make_route, rank, world, buckets, on_host=on_host)
        return schedules[rank]

    if exact is None:
        exact = world <= _RECORDED_EXACTLY
    if not exact:
        for rank in (1, world // 2, world - 1):
            schedule(rank)
    steps: list[Step] = []
    for place, operation in enumerate(schedule(0)):
        if isinstance(operation, Send):
            found = _messages(place, world, schedule) if exact else _alike(place, world, schedules)
            steps.append(Start(operation.number, found))
        else:
            steps.append(operation)
    for place, step in enumerate(steps):
        if isinstance(step, Compute):
            same = [_compute_at(found, place) for found in schedules.values()]
            steps[place] = Compute(step.kernel, max(one.values for one in same), step.messages)
    return Program(world, steps, len(schedules))


def _compute_at(schedule: Sequence[Operation], place: int) -> Compute:
    operation = schedule[place]
    assert isinstance(operation, Compute), "every rank does the same"
    return operation


def _messages(place: int, world: int, schedule: Callable[[int], Sequence[Operation]]) -> Messages:
    """Return the batch of all ranks, from one rank of each link."""
    links: list[list[int]] = []
    lengths: list[list[int]] = []
    kinds: set[bool] = set()
    steps: list[int] | None = None
    known = np.zeros(world, dtype=bool)
    while not known.all():
        rank = int(np.argmin(known))
        members = sorted([rank, *(peer for peer, _ in _send_at(schedule(rank), place).sends)])
        of_sender, of_members = None, [0] * len(members)
        for index, member in enumerate(members):
            operation = _send_at(schedule(member), place)
            own_steps = [(members.index(peer) - index) % len(members) for peer, _ in operation.sends]
            assert steps in (None, own_steps), "every rank sends in the same order"
            steps = own_steps
            of_sender, of_members = _lengths(operation, members, index)
            if of_sender is not None or len(set(of_members)) == 1:
                break  # otherwise another rank knows
        known[members] = True
        links.append(members)
        lengths.append(of_members)
        kinds |= set() if of_sender is None else {of_sender}
    assert len(kinds) <= 1, "lengths are the senders' or the receivers' on all links"
    return Messages(np.array(links), np.array(steps), np.array(lengths), of_sender=kinds == {True})


def _alike(place: int, world: int, schedules: Mapping[int, Sequence[Operation]]) -> Messages:
    """Return the batch of all ranks by shifting rank 0's link; the recorded ranks confirm that."""
    operation = _send_at(schedules[0], place)
    first = np.array(sorted([0, *(peer for peer, _ in operation.sends)]))
    known, links = np.zeros(world, dtype=bool), []
    while not known.all():
        members = first + int(np.argmin(known))
        assert members[-1] < world, "links are alike"
        assert not known[members].any(), "links are alike"
        known[members] = True
        links.append(members)
    kinds, lengths = set(), []
    for rank, schedule in schedules.items():
        operation = _send_at(schedule, place)
        members = sorted([rank, *(peer for peer, _ in operation.sends)])
        assert any(members == link.tolist() for link in links if rank in link), "links are alike"
        kind, of_members = _lengths(operation, members, members.index(rank))
        kinds.add(kind)
        lengths.append(of_members)
    steps = np.array([list(first).index(peer) for peer, _ in _send_at(schedules[0], place).sends])
    longest = lengths[int(np.argmax([sum(one) for one in lengths]))]
    return Messages(np.array(links), steps, np.tile(longest, (len(links), 1)), of_sender=True in kinds)


def _send_at(schedule: Sequence[Operation], place: int) -> Send:
    operation = schedule[place]
    assert isinstance(operation, Send), "every rank does the same"
    return operation


def _lengths(operation: Send, members: Sequence[int], index: int) -> tuple[bool | None, list[int]]:
    """Return whether lengths are the senders' (``None``: unknown to this rank), and the members' lengths."""
    sent, received = dict(operation.sends), dict(operation.receives)
    of_receivers = {**sent, members[index]: next(iter(received.values()))}
    of_senders = {**received, members[index]: next(iter(sent.values()))}
    if len(set(sent.values())) > 1:
        return False, [of_receivers[rank] for rank in members]
    kind = True if len(set(received.values())) > 1 or len(members) == 2 else None
    return kind, [of_senders[rank] for rank in members]
