"""Gathers whose messages are differences to what was gathered last, of which every host keeps a copy.

What rounding loses of a difference is in the next one, as that is taken to the copy: no error is kept apart.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ddp_quant_hooks.exchange.plan import Span
from ddp_quant_hooks.fsdp.gather_plan import Route, ShardFormat, join_neighbors, message_tags, pause_before
from ddp_quant_hooks.fsdp.kept import KeptMemory
from ddp_quant_hooks.kernels.layout import ALIGNMENT
from dist_utils import start_messages
from dist_utils.process_groups import record_use

_MOST_ERROR = 0.005
"""The largest error of a parameter's shard, relative to it in L2, with which a difference is sent: less than
that of 8 bits, 0.0065."""


def note_bytes(parameters: int) -> int:
    """Return the size of what a message has behind its values: a note about so many parameters.

    It says of which module the message is, how many gathers have changed the sender's copies, and of which
    parameters values follow: four bytes each.
    """
    return -(-4 * (2 + parameters) // ALIGNMENT) * ALIGNMENT


class Sent(NamedTuple):
    """What a gather has sent, or received.

    Attributes:
        has_values: Whether values themselves, of any parameter, were sent or received.
        bytes_to_receiver: What each rank got that takes this one's differences.
        bytes_inside: What each other rank of the host got.
    """

    has_values: bool
    bytes_to_receiver: int
    bytes_inside: int


class Tags(NamedTuple):
    """The tags of the messages of one module."""

    differences: int
    values: int
    problems: int
    inside: int


class Differences:
    """The copies of some of a module's shards, and the gathers that keep them up to date.

    A rank has copies of its own shard and of those that it gets from other hosts, and hands them on inside
    its host, as they are. All copies of a shard are bitwise equal: they change by what messages say, the
    owner's, too.

    Args:
        name: The name of the module, for errors.
        group: The ranks that gather.
        route: How messages get to this one.
        agreement: What the ranks call this use of the module.
    """

    def __init__(self, name: str, group: dist.ProcessGroup, route: Route, agreement: str) -> None:
        self._name, self._group, self._route = name, group, route
        self._tags = Tags(*message_tags(agreement, name, *Tags._fields))
        self._checksum = self._tags.differences >> 1  # as an int32: not every backend has tags
        self._copies: _Copies | None = None
        self._times_started_over = 0

    def start_over(self) -> None:
        """Free the copies, also of a gather that is still going on: the next one sends values."""
        self._copies = None
        self._times_started_over += 1

    def own_copy(self, like: torch.Tensor) -> torch.Tensor | None:
        """Return the copy of this rank's shard, which is ``like``; ``None`` if there is none."""
        if self._copies is None or not self._fit(like):
            return None
        self._copies.begin_use()
        return self._copies.rows[0]

    def gather(
        self,
        form: ShardFormat,
        output: torch.Tensor,
        own: torch.Tensor,
        *,
        again: bool,
    ) -> Generator[None, None, Sent]:
        """Gather the shards of all ranks; pause before each wait.

        Args:
            form: Of the messages, with a note.
            output: The output, in the order of ranks.
            own: This rank's shard.
            again: Gather what was gathered last, if there is something: between hosts nothing is sent then.

        Returns:
            What was sent; see :class:`Sent`.
        """
        copies = self._copies if self._fit(own) else None
        self._copies = None  # until all of them are what they should be: an error leaves none
        times = self._times_started_over
        sent = Sent(has_values=False, bytes_to_receiver=0, bytes_inside=0)
        if copies is None or not again:
            copies = copies or _Copies(1 + len(self._route.entering), own)
            copies.begin_use()
            sent = yield from self._update(copies, form, own)
        else:
            copies.begin_use()
        inside = yield from self._hand_on(copies.rows, output)
        copies.end_use()
        if times == self._times_started_over:
            self._copies = copies
        return sent._replace(bytes_inside=sent.bytes_inside + inside)

    def _fit(self, own: torch.Tensor) -> bool:
        """Return whether there are copies of such shards."""
        if self._copies is None:
            return False
        row = self._copies.rows[0]
        return (row.shape, row.dtype, row.device) == (own.shape, own.dtype, own.device)

    def _update(self, copies: _Copies, form: ShardFormat, own: torch.Tensor) -> Generator[None, None, Sent]:
        """Bring all copies up to date; return what was sent."""
        entering, leaving, rows = self._route.entering, self._route.leaving, copies.rows
        message = torch.empty(form.message_bytes, dtype=torch.uint8, device=own.device)
        received = torch.empty(len(entering), form.message_bytes, dtype=torch.uint8, device=own.device)
        # What has not changed keeps its bits, as for all micro-batches of a step.
        shard = rows[0] if torch.equal(own, copies.last) else own
        coarse = encode_difference(form, shard, rows[0], message)
        if copies.number == 0:
            coarse = [True] * len(coarse)
        values = join_neighbors(zip(form.lengths, coarse, strict=True))
        copies.last.copy_(own)
        note = torch.zeros(form.note_bytes // 4, dtype=torch.int32)
        note[: 2 + len(coarse)] = torch.tensor([self._checksum, copies.number, *coarse])
        form.note(message).view(torch.int32).copy_(note)
        yield from pause_before(
            start_messages(
                self._group,
                receives=zip(entering, received, strict=True),
                sends=[(rank, message) for rank in leaving],
                tag=self._tags.differences,
            )
        )
        for each in (message, received):
            record_use(each)  # an asynchronous gather may go on on another stream
        for row, each in zip(rows[1:], received, strict=True):
            decode_difference(form, each, row)
        for span in values:
            _part(rows[0], span).copy_(_part(own, span))
        values_of, problem = self._read_notes(form, received, copies.number)
        places = dict(zip(entering, rows[1:], strict=True))
        yield from pause_before(
            start_messages(
                self._group,
                receives=[
                    (rank, _bytes(places[rank], span)) for rank, spans in values_of.items() for span in spans
                ],
                sends=[(rank, _bytes(rows[0], span)) for rank in leaving for span in values],
                tag=self._tags.values,
            )
        )
        copies.number += 1
        told = yield from self._raise_together(problem, copies.number, own.device)
        to_receiver = form.message_bytes + own.itemsize * sum(map(len, values))
        return Sent(bool(values) or any(values_of.values()), to_receiver, told)

    def _read_notes(
        self, form: ShardFormat, received: torch.Tensor, number: int
    ) -> tuple[dict[int, list[Span]], str]:
        """Return which values each rank sends, too, and why their messages are none for this rank, or ``""``.

        That is so if a rank gathers another module, or its copies have been through another number of
        gathers. Waits for an accelerator.
        """
        notes = received[:, -form.note_bytes :].contiguous().view(torch.int32).tolist()
        values_of, problem = {}, ""
        for rank, (checksum, theirs, *coarse) in zip(self._route.entering, notes, strict=True):
            values_of[rank] = join_neighbors(zip(form.lengths, map(bool, coarse), strict=False))
            if checksum != self._checksum:
                problem = (
                    f"rank {rank} gathers another module or model: let all ranks gather the same modules in "
                    "the same order"
                )
            elif theirs != number:
                problem = (
                    f"{theirs} gathers have changed the copies of rank {rank}, but {number} those of this "
                    "rank: let all ranks gather the same modules in the same order, or start_over() on all "
                    "of them"
                )
        return values_of, problem

    def _raise_together(self, problem: str, number: int, device: torch.device) -> Generator[None, None, int]:
        """Raise a problem on all ranks of the host, before they hand on what has it.

        The ranks of other hosts that send to this one's have it, too: so no rank is left waiting.

        Returns:
            How many bytes each other rank of the host got.

        Raises:
            RuntimeError: There is one, or a rank of the host gathers another module, or its copies have been
                through another number of gathers.
        """
        inside = self._route.inside
        all_well = [self._checksum, number, 0]
        note = torch.tensor([*all_well[:2], int(bool(problem))], dtype=torch.int32, device=device)
        received = torch.empty(len(inside), len(note), dtype=torch.int32, device=device)
        yield from pause_before(
            start_messages(
                self._group,
                receives=zip(inside, received.view(torch.uint8), strict=True),
                sends=[(rank, note.view(torch.uint8)) for rank in inside],
                tag=self._tags.problems,
            )
        )
        for each in (note, received):
            record_use(each)
        for rank, told in zip(inside, received.tolist(), strict=True):
            if told != all_well and not problem:
                problem = (
                    f"the copies of rank {rank} on this host are not as its peers': see the error there, and "
                    "start_over() on all ranks"
                )
        if problem:
            raise RuntimeError(f"module {self._name!r}: {problem}")
        return note.nbytes if inside else 0

    def _hand_on(self, rows: torch.Tensor, output: torch.Tensor) -> Generator[None, None, int]:
        """Write the shards of all ranks, which those of the host have; return how much each of them got."""
        route, shards = self._route, output.view(len(self._route.order), -1)
        columns = [(peer, (peer, *route.order[span.start : span.stop])) for peer, span in route.handed_on]
        memory = [rows.new_empty(len(ranks), rows.shape[1]) for _, ranks in columns]
        receives = zip(route.inside, memory, strict=True)
        works = start_messages(
            self._group,
            receives=[(peer, place.view(torch.uint8)) for peer, place in receives],
            sends=[(peer, rows.view(torch.uint8)) for peer in route.inside],
            tag=self._tags.inside,
        )
        for rank, row in zip((self._group.rank(), *route.entering), rows, strict=True):
            shards[rank].copy_(row)
        yield from pause_before(works)
        for (_, ranks), place in zip(columns, memory, strict=True):
            record_use(place)
            for rank, row in zip(ranks, place, strict=True):
                shards[rank].copy_(row)
        return rows.nbytes if route.inside else 0


def encode_difference(
    form: ShardFormat, shard: torch.Tensor, copy: torch.Tensor, message: torch.Tensor
) -> list[bool]:
    """Write the message of a shard, and change the copy as that says.

    Args:
        form: Of the message.
        shard: The shard.
        copy: Its copy, of the same dtype.
        message: The output.

    Returns:
        For each parameter whether its copy is still too far from it. Waits for an accelerator.
    """
    form.encode_runs(shard.float() - copy.float(), message)
    form.encode_exact(shard, message)
    decode_difference(form, message, copy)
    left, lengths = shard.float() - copy.float(), list(form.lengths)
    # In fp64, which has the squares of all fp32 numbers.
    errors, sizes = (
        torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts])
        for parts in (torch.split(left, lengths), torch.split(shard.float(), lengths))
    )
    is_near = (errors <= _MOST_ERROR * sizes) & sizes.isfinite()
    return is_near.logical_not().tolist()


def decode_difference(form: ShardFormat, message: torch.Tensor, copy: torch.Tensor) -> None:
    """Change the copy of a shard as a message says."""
    difference = torch.empty(copy.shape, dtype=torch.float32, device=copy.device)
    form.decode_runs(message, (0,), difference)
    copy.copy_(difference.add_(copy))
    form.decode_exact(message, (0,), copy)


class _Copies(KeptMemory):
    """Copies of shards, of zeros at first.

    Args:
        count: How many.
        like: A shard.

    Attributes:
        rows: This rank's own, then those that other ranks send it.
        last: The shard that this rank's own is a copy of.
        number: How many gathers have changed them.
    """

    def __init__(self, count: int, like: torch.Tensor) -> None:
        with torch.inference_mode(False):
            super().__init__(torch.zeros(1 + count, like.numel(), dtype=like.dtype, device=like.device))
            self.last, self.rows = self.tensor[0], self.tensor[1:]
        self.number = 0


def _part(row: torch.Tensor, span: Span) -> torch.Tensor:
    return row[span.start : span.stop]


def _bytes(row: torch.Tensor, span: Span) -> torch.Tensor:
    return _part(row, span).view(torch.uint8)
