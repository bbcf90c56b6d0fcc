"""Memory of residuals: what a step has lost of a bucket's values, by owner and in slots with names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import torch

from ddp_quant_hooks.exchange.plan import Span
from ddp_quant_hooks.feedback.step import value_count

RESIDUAL_DTYPE = torch.bfloat16
"""bf16 keeps 8 significant bits: of a step's rounding error, at most 2^-8 is lost for good, with a random
sign. If steps lose at most R (half a quantization step, of a block that is not rotated), the mean of T steps
is wrong by at most R (1 / T + 2^-8). fp16 lacks the range: the rounding errors of gradients of 1e-7 become
zero in it, and those of loss-scaled gradients infinite."""


class Key:
    """Names values of plain tensors. Residuals belong to it as to a parameter.

    Args:
        name: The key of a call, with the number of the tensor if there are several.
        shape: The shape of the values.
        is_complex: Whether they are complex.

    Attributes:
        name: As given.
        shape: The shape that they have now.
        is_complex: As given.
        contents: The numbers and shapes of the parameters whose values follow each other here, none if nobody
            knows which; ``None``: those of no parameters, or of the same as when they were saved.
    """

    def __init__(self, name: str, shape: Sequence[int], *, is_complex: bool = False) -> None:
        self.name, self.shape, self.is_complex = name, torch.Size(shape), is_complex
        self.contents: Sequence[tuple[int, torch.Size]] | None = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Key:
        """Return a key that names the values of a tensor."""
        return cls(name, tensor.shape, is_complex=tensor.is_complex())

    @property
    def count(self) -> int:
        """The number of real values; a complex number has two."""
        return self.shape.numel() * (2 if self.is_complex else 1)


Owner: TypeAlias = torch.Tensor | Key
"""What residuals belong to: a parameter, or a key. Both have a shape."""


def owner_length(owner: Owner) -> int:
    """Return the number of real values of an owner."""
    return owner.count if isinstance(owner, Key) else value_count(owner)


def value_order(owner: Owner) -> tuple[int, ...]:
    """Return the order in which an owner's values come in a bucket: of a key always the same.

    DDP has the strides that a parameter had when the buckets were made. They show in a gradient that is a
    view of its bucket; else those of the parameter must do, which differ after a change of its memory format
    until the buckets are made again.
    """
    if isinstance(owner, Key):
        return ()
    tensor = owner if owner.grad is None else owner.grad
    return order_of(tensor.shape, tensor.stride())


def order_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that decide the order of values: not those of dimensions with one element."""
    if 1 not in shape:
        return tuple(strides)
    return tuple(stride for size, stride in zip(shape, strides, strict=False) if size != 1)


@dataclass(frozen=True)
class Slot:
    """One kind of numbers that are kept for a bucket from one step to the next.

    They are residuals, of some of the bucket's values; or whatever belongs to owners and must change only
    with a step that counts, of any length.

    Attributes:
        spans: The numbers that this rank keeps, in the order of its memory. Those of different weights may
            overlap, and do not mix.
        dtype: Their dtype.
        lengths: How many numbers each owner has in this slot; ``None``: one for each of its values.
        fill: Called with an owner's place in the order of owners and its part of the memory, before the
            first step that reads it; ``None``: they begin as zeros.
    """

    spans: tuple[Span, ...]
    dtype: torch.dtype = RESIDUAL_DTYPE
    lengths: Sequence[int] | None = None
    fill: Callable[[int, torch.Tensor], object] | None = None

    def starts(self, of_values: tuple[int, ...]) -> tuple[int, ...]:
        """Return where the numbers of each owner begin, from where its values do in the bucket."""
        return of_values if self.lengths is None else (0, *accumulate(self.lengths))


class Piece(NamedTuple):
    """A part of what is kept for an owner in a slot.

    Attributes:
        start: The number of its first value in the owner.
        weight: See :class:`ddp_quant_hooks.exchange.plan.Span`.
        values: The residuals, flat.
    """

    start: int
    weight: float
    values: torch.Tensor


class OwnerSlot(NamedTuple):
    """What is kept for an owner in a slot.

    Attributes:
        length: How many numbers the owner has there.
        pieces: Those that this rank keeps, all of one dtype.
    """

    length: int
    pieces: list[Piece]


class OwnerResiduals(NamedTuple):
    """All that is kept for an owner.

    Attributes:
        order: The order of its values when they came last; see :func:`value_order`.
        slots: By the names of the slots.
    """

    order: tuple[int, ...]
    slots: Mapping[str, OwnerSlot]


@dataclass
class Residual:
    """A slot's two tensors, which swap roles: of the last step that counts, and of the running one.

    Attributes:
        spans: As of :class:`Slot`.
        starts: Where the numbers of each owner begin in the slot, and where those of the last one end.
        last: What the running step reads.
        next: What it writes, all of it; ``None`` where no step can.
    """

    spans: tuple[Span, ...]
    starts: tuple[int, ...]
    last: torch.Tensor
    next: torch.Tensor | None = None

    @classmethod
    def of_slot(cls, slot: Slot, starts: tuple[int, ...], device: torch.device) -> Residual:
        """Return what a first step reads and writes, for owners whose numbers begin at ``starts``."""
        length = sum(map(len, slot.spans))
        last, following = (torch.zeros(length, dtype=slot.dtype, device=device) for _ in range(2))
        residual = cls(slot.spans, starts, last, following)
        if slot.fill is not None:
            for index in range(len(starts) - 1):
                for _, here in residual.parts(index):
                    slot.fill(index, last[here])
        return residual

    @classmethod
    def of_owner(cls, kept: OwnerSlot) -> Residual:
        """Return a copy of what is kept for one owner, for reading only."""
        spans = tuple(Span(one.start, one.start + one.values.numel(), one.weight) for one in kept.pieces)
        return cls(spans, (0, kept.length), torch.cat([one.values for one in kept.pieces]))

    def fits(self, slot: Slot, starts: tuple[int, ...], device: torch.device) -> bool:
        """Return whether a step can use it as this slot, for owners whose numbers begin at ``starts``."""
        here = self.spans, self.starts, self.last.dtype, self.last.device
        return self.next is not None and here == (slot.spans, starts, slot.dtype, device)

    def parts(self, index: int) -> Iterator[tuple[Span, slice]]:
        """Yield what is kept of an owner's numbers: which of them, and where.

        Args:
            index: The owner's place in the order of owners.
        """
        start, stop = self.starts[index : index + 2]
        offset = 0
        for span in self.spans:
            low, high = max(span.start, start), min(span.stop, stop)
            if low < high:
                first = offset + low - span.start
                yield Span(low - start, high - start, span.weight), slice(first, first + high - low)
            offset += len(span)

    def length(self, index: int) -> int:
        """Return how many numbers an owner has in the slot."""
        return self.starts[index + 1] - self.starts[index]

    def of(self, index: int, values: torch.Tensor) -> OwnerSlot:
        """Return what ``values``, which are :attr:`last` or :attr:`next`, have of an owner."""
        pieces = [Piece(span.start, span.weight, values[here]) for span, here in self.parts(index)]
        return OwnerSlot(self.length(index), pieces)

    def take(self, index: int, other: Residual, other_index: int) -> int:
        """Copy an owner's numbers from where they are, and return how many have a place here, too.

        Args:
            index: The owner's place here.
            other: Where they are.
            other_index: Its place there.
        """
        if (self.length(index), self.last.dtype) != (other.length(other_index), other.last.dtype):
            return 0  # they are of another kind
        copied, here = 0, list(self.parts(index))
        for old, source in other.parts(other_index):
            for new, target in here:
                low, high = max(old.start, new.start), min(old.stop, new.stop)
                if low < high and old.weight == new.weight:
                    values = other.last[source][low - old.start : high - old.start]
                    self.last[target][low - new.start : high - new.start] = values
                    copied += high - low
        return copied

    def keep_unless(self, failed: torch.Tensor) -> None:
        """Keep what a step has written unless it failed. On an accelerator this does not block."""
        if self.next is None:
            return
        if failed.device.type != "cpu":
            torch.where(failed, self.last, self.next, out=self.last)
        elif not failed:
            self.last, self.next = self.next, self.last

    def keep_last(self, index: int) -> None:
        """Let an owner's numbers be what they were before the running step."""
        if self.next is not None:
            for _, here in self.parts(index):
                self.next[here] = self.last[here]


@dataclass
class BucketResiduals:
    """What is kept for the owners of one bucket.

    Attributes:
        starts: Where the values of each owner begin in the bucket, and where those of the last one end.
        slots: By the names of the slots. One that keeps nothing is left out.
    """

    starts: tuple[int, ...] = (0,)
    slots: dict[str, Residual] = field(default_factory=dict)

    @classmethod
    def of_slots(
        cls, lengths: Sequence[int], slots: Mapping[str, Slot], device: torch.device
    ) -> BucketResiduals:
        """Return what a first step reads and writes, for owners of these lengths."""
        starts = (0, *accumulate(lengths))
        residuals = {
            name: Residual.of_slot(slot, slot.starts(starts), device) for name, slot in slots.items()
        }
        return cls(starts, residuals)

    @classmethod
    def of_owner(cls, length: int, slots: Mapping[str, OwnerSlot]) -> BucketResiduals:
        """Return a copy of what is kept for one owner of so many values, for reading only."""
        return cls((0, length), {name: Residual.of_owner(slot) for name, slot in slots.items()})

    def span(self, slot: str, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a part of a slot's memory: what the step reads, and what it must write.

        Args:
            slot: The name of the slot.
            start: The first number; they are counted in the order of the slot's spans.
            length: How many.

        Returns:
            Twice ``None`` where nothing is kept.
        """
        kept = self.slots.get(slot)
        if kept is None or kept.next is None:
            return None, None
        return kept.last[start : start + length], kept.next[start : start + length]

    def fits(self, slots: Mapping[str, Slot], device: torch.device) -> bool:
        """Return whether a step with the same owners can use it as these slots."""
        return self.slots.keys() == slots.keys() and all(
            self.slots[name].fits(slot, slot.starts(self.starts), device) for name, slot in slots.items()
        )

    def kept(self, index: int) -> int:
        """Return how many numbers are kept for an owner."""
        return sum(len(span) for one in self.slots.values() for span, _ in one.parts(index))

    def take(self, index: int, other: BucketResiduals, other_index: int) -> int:
        """Copy all that is kept for an owner from another bucket; see :meth:`Residual.take`."""
        both = self.slots.keys() & other.slots.keys()
        return sum(self.slots[name].take(index, other.slots[name], other_index) for name in both)

    def freeze(self) -> None:
        """Let no step write it any more."""
        for residual in self.slots.values():
            residual.next = None
