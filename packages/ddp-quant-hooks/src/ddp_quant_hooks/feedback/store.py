"""Residuals: rounding errors of gradients, which belong to parameters, and when they change."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp_quant_hooks.exchange.spans import Span
from ddp_quant_hooks.feedback.step import Kind, Step, value_count
from dist_utils import torch_compat
from dist_utils.comm_hooks import Bucket

_log = logging.getLogger(__name__)

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
        shape: The shape that they have now.
        contents: What the values are, if they are not always the same of equal number; ``None``: not known.
    """

    def __init__(self, name: str, shape: Sequence[int], *, is_complex: bool = False) -> None:
        self.name, self.shape, self.is_complex = name, torch.Size(shape), is_complex
        self.contents: object = None

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Key:
        """Return a key that names the values of a tensor."""
        return cls(name, tensor.shape, is_complex=tensor.is_complex())

    @property
    def count(self) -> int:
        """The number of real values; a complex number has two."""
        return self.shape.numel() * (2 if self.is_complex else 1)


Owner: TypeAlias = torch.Tensor | Key
"""What residuals belong to: a parameter, or a key."""


class Piece(NamedTuple):
    """A part of an owner's residuals.

    Attributes:
        start: The number of its first value in the owner.
        weight: See :class:`ddp_quant_hooks.exchange.spans.Span`.
        values: The residuals, flat.
    """

    start: int
    weight: float
    values: torch.Tensor


class OwnerResiduals(NamedTuple):
    """The residuals of a parameter or key.

    Attributes:
        own: Rounding errors of values that this rank was the first to encode.
        shard: Rounding errors of means that it has computed.
    """

    own: list[Piece]
    shard: list[Piece]


def owner_length(owner: Owner) -> int:
    """Return the number of real values of an owner."""
    return owner.count if isinstance(owner, Key) else value_count(owner)


@dataclass
class Residual:
    """Two tensors that swap roles: rounding errors of the last step that counts, and of the running one.

    Both are ``None`` where nothing is kept; ``next`` alone where no step can write it.

    Attributes:
        spans: The values of a bucket that they cover, in their order.
        last: Added to these values.
        next: Written while they are encoded.
    """

    spans: tuple[Span, ...] = ()
    last: torch.Tensor | None = None
    next: torch.Tensor | None = None

    @classmethod
    def zeros(cls, spans: Sequence[Span], device: torch.device) -> Residual:
        """Return a residual of zeros."""
        if not spans:
            return cls()
        length = sum(map(len, spans))
        last, following = (torch.zeros(length, dtype=RESIDUAL_DTYPE, device=device) for _ in range(2))
        return cls(tuple(spans), last, following)

    @classmethod
    def of_pieces(cls, pieces: Sequence[Piece]) -> Residual:
        """Return a copy of an owner's residual, for reading only."""
        if not pieces:
            return cls()
        spans = tuple(Span(one.start, one.start + one.values.numel(), one.weight) for one in pieces)
        return cls(spans, torch.cat([one.values.to(RESIDUAL_DTYPE) for one in pieces]))

    def span(self, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return elements ``start`` to ``start + length`` of both."""
        if self.last is None or self.next is None:
            return None, None
        return self.last[start : start + length], self.next[start : start + length]

    def covers(self, spans: Sequence[Span], device: torch.device) -> bool:
        """Return whether a step can use it for these values."""
        if not spans:
            return not self.spans
        usable = self.last is not None and self.next is not None and self.last.device == device
        return usable and self.spans == tuple(spans)

    def parts(self, start: int, length: int) -> Iterator[tuple[Span, slice]]:
        """Yield what is kept of an owner's values: which of them, and where.

        Args:
            start: Where the owner's values begin in the bucket.
            length: How many there are.
        """
        offset = 0
        for span in self.spans:
            low, high = max(span.start, start), min(span.stop, start + length)
            if low < high:
                first = offset + low - span.start
                yield Span(low - start, high - start, span.weight), slice(first, first + high - low)
            offset += len(span)

    def take(self, other: Residual, start: int, length: int, to: int) -> int:
        """Copy an owner's residuals from where they are, and return how many have no place here.

        Args:
            other: Where they are.
            start: Where the owner's values begin there.
            length: How many there are.
            to: Where they begin here.
        """
        homeless, here = 0, list(self.parts(to, length))
        for old, source in other.parts(start, length):
            homeless += len(old)
            for new, target in here:
                low, high = max(old.start, new.start), min(old.stop, new.stop)
                if low >= high or old.weight != new.weight:
                    continue
                if self.last is not None and other.last is not None:
                    values = other.last[source][low - old.start : high - old.start]
                    self.last[target][low - new.start : high - new.start] = values
                    homeless -= high - low
        return homeless

    def keep_unless(self, failed: torch.Tensor) -> None:
        """Keep a step's rounding errors unless it failed. On an accelerator this does not block."""
        if self.last is None or self.next is None:
            return
        if failed.device.type != "cpu":
            torch.where(failed, self.last, self.next, out=self.last)
        elif not failed:
            self.last, self.next = self.next, self.last

    def keep_last(self, start: int, length: int) -> None:
        """Let an owner's residuals be what they were before the running step."""
        if self.last is not None and self.next is not None:
            for _, here in self.parts(start, length):
                self.next[here] = self.last[here]


@dataclass
class BucketResiduals:
    """The residuals of one bucket.

    Attributes:
        own: Rounding errors of values that this rank was the first to encode.
        shard: Rounding errors of means that it has computed.
        count: The number of values of the bucket.
    """

    own: Residual = field(default_factory=Residual)
    shard: Residual = field(default_factory=Residual)
    count: int = 0

    @property
    def both(self) -> tuple[Residual, Residual]:
        """Both kinds."""
        return self.own, self.shard

    def span(self, slot: str, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return a part of a slot: what the step reads, and what it writes; twice ``None``: nothing."""
        return (self.own if slot == "own" else self.shard).span(start, length)


class _Place(NamedTuple):
    """The bucket in which an owner last came, where its values begin there, and how many there were."""

    bucket: BucketResiduals
    start: int
    length: int


class Feedback:
    """The residuals of a state, and the step that is adding to them.

    A bucket has a pair of tensors of each kind. Which values they cover is up to the exchange. When an owner
    comes in another bucket, or its values are covered by other spans, what both have in common is copied and
    the rest dropped, with a line in the log. A bucket is freed when all its owners are elsewhere or gone.

    A step is finished when the next one begins: its rounding errors are kept if it ended well, all its means
    were finite, and the user has not discarded it.

    Args:
        own: Keep the rounding errors of a rank's own values.
        shard: Keep those of the means that it computes.
        wait: Returns when all jobs so far have run. Its owner is not kept alive.
    """

    def __init__(self, *, own: bool, shard: bool, wait: Callable[[], None]) -> None:
        self._own, self._shard = own, shard
        self._wait = weakref.WeakMethod(wait)
        self.keys: dict[str, Key] = {}
        """The keys that have been used, by name."""
        self.origin = "none"
        """Where residuals were loaded from, in words that are identical on all ranks."""
        self.loads = 0
        """How often they were loaded."""
        self._places: Any = WeakIdKeyDictionary()
        self._step: Step | None = None
        self._block: Step | None = None
        self._written: list[BucketResiduals] = []  # by the step
        self._dropped = 0
        self._steps = 0

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self._own or self._shard

    def begin_bucket(self, bucket: Bucket) -> Step:
        """Return the step that a bucket belongs to; the first of a step finishes the one before.

        Call it on the caller's thread, with every bucket that DDP hands over.
        """
        if not self.wanted:
            return Step(Kind.BACKWARD)  # a placeholder: nothing is kept
        if self.step_is_open:
            raise ValueError("step() is for plain tensors: each backward() of a model's buckets is a step")
        task, step = torch_compat.graph_task_id(), self._step
        if step is None or not step.includes(task, bucket.index()):
            step = self._begin(Kind.BACKWARD)
        step.add_bucket(task, bucket)
        return step

    def begin_step(self) -> Step:
        """Begin a step of plain tensors that lasts until it is closed, and finish the one before.

        Raises:
            RuntimeError: Another one is open.
        """
        if self.step_is_open:
            raise RuntimeError("step() inside step(): end the first one first")
        self._block = self._begin(Kind.BLOCK) if self.wanted else Step(Kind.BLOCK)
        return self._block

    def begin_tensors(self) -> Step:
        """Return the step that a call on plain tensors belongs to.

        That is the open step; otherwise, inside ``backward()``, that pass; otherwise the call is a step of
        its own.
        """
        if not self.wanted:
            return Step(Kind.CALL)
        task, step = torch_compat.graph_task_id(), self._step
        if step is None or not step.includes(task):
            step = self._begin(Kind.CALL)
        step.add_call(task)
        return step

    def residuals(
        self,
        step: Step,
        owners: Sequence[Owner],
        own: Sequence[Span],
        shard: Sequence[Span],
        device: torch.device,
    ) -> BucketResiduals:
        """Return the residuals of a bucket; zeros where nothing is known.

        Args:
            step: The running step, which writes them.
            owners: The parameters of the bucket, or keys, in its order.
            own: The values that this rank is the first to encode.
            shard: The values whose means it rounds. Those of several levels overlap, and do not mix.
            device: Their device.

        Raises:
            ValueError: The owners are keys, and other residuals are of parameters, or the other way round.
        """
        if step is not self._step:
            return BucketResiduals()  # nothing is kept
        first = next(iter(self._places), owners[0])
        if isinstance(first, Key) != isinstance(owners[0], Key):
            raise ValueError(
                "a state with error feedback is for a model's buckets or for plain tensors, not for both: "
                "make one for each"
            )
        own, shard = own if self._own else (), shard if self._shard else ()
        bucket = self._bucket_of(owners)
        if bucket is None or not (bucket.own.covers(own, device) and bucket.shard.covers(shard, device)):
            count = sum(map(owner_length, owners))
            bucket = BucketResiduals(Residual.zeros(own, device), Residual.zeros(shard, device), count)
            self._move(owners, bucket)
        self._written.append(bucket)
        return bucket

    def key_of(self, name: str, tensor: torch.Tensor) -> Key:
        """Return the key of this name, always the same one, for values of another shape."""
        key = self.keys.setdefault(name, Key.of(name, tensor))
        key.shape, key.is_complex = tensor.shape, tensor.is_complex()
        return key

    def require_length(self, name: str, count: int) -> None:
        """Raise ``ValueError`` if a key was used with another number of values, which its residual has."""
        known = self.keys.get(name)
        if known is not None and known.count != count:
            raise ValueError(
                f"the key {name!r} had {known.count} values before, and now it has {count}: values of "
                "another length need another key"
            )

    def free(self, name: str) -> None:
        """Forget a key and its residuals."""
        known = self.keys.pop(name, None)
        if known is not None:
            self._places.pop(known, None)

    def discard(self) -> None:
        """Discard the last step: it changes no residuals."""
        if self._step is not None:
            self._step.discard()

    def drop_failed_step(self) -> None:
        """Let what comes next not be taken for a part of a backward pass that raised."""
        if self._step is not None and not (self._step.ended_well or self._step.open):
            self._step = None

    @property
    def steps(self) -> int:
        """The number of steps that count, including the last one."""
        return self._steps + (self._step is not None and self._step.counts)

    @property
    def step_is_open(self) -> bool:
        """Whether a step of plain tensors is open."""
        return self._block is not None and self._block.open

    def snapshot(self) -> Iterator[tuple[Owner, OwnerResiduals]]:
        """Yield the owners and their residuals as of the last step that counts. All jobs must have run."""
        kept = {id(residual) for residual, failed in self._new() if not failed}

        def pieces(residual: Residual, place: _Place) -> list[Piece]:
            values = residual.next if id(residual) in kept else residual.last
            if values is None:
                return []
            parts = residual.parts(place.start, place.length)
            return [Piece(span.start, span.weight, values[here]) for span, here in parts]

        for owner, place in self._places.items():
            if place.length == owner_length(owner):  # else a parameter was resized
                yield owner, OwnerResiduals(*(pieces(residual, place) for residual in place.bucket.both))

    def forget(self) -> None:
        """Start over as if nothing had been lost so far. All jobs must have run."""
        self._places, self.keys = WeakIdKeyDictionary(), {}
        self._step, self._written = None, []
        self.origin = "none"

    def load(self, residuals: Sequence[tuple[Owner, OwnerResiduals]], steps: int) -> None:
        """Replace everything with copies of saved residuals. All jobs must have run."""
        loaded = [
            (owner, BucketResiduals(Residual.of_pieces(own), Residual.of_pieces(shard), owner_length(owner)))
            for owner, (own, shard) in residuals
        ]
        self.forget()
        for owner, bucket in loaded:
            self._places[owner] = _Place(bucket, 0, bucket.count)
            if isinstance(owner, Key):
                self.keys[owner.name] = owner
        self.origin, self._steps = f"of {'keys' if self.keys else 'parameters'} in step {steps}", steps
        self.loads += 1

    def _begin(self, kind: Kind) -> Step:
        """Begin a step, and finish the one before."""
        ended, wait = self._step, self._wait()
        if ended is not None and (ended.outside or ended.kind is not Kind.BACKWARD) and wait is not None:
            wait()  # DDP has waited for the others' jobs
        for residual, failed in self._new():
            residual.keep_unless(failed)
        self._steps = self.steps
        if self._dropped:
            _log.info(
                "dropped the residuals of %d values, which come in other buckets or shards now", self._dropped
            )
        self._step, self._written, self._dropped = Step(kind), [], 0
        return self._step

    def _new(self) -> Iterator[tuple[Residual, torch.Tensor]]:
        """Yield what the last step has written if it counts, each with whether a mean was not finite."""
        step = self._step
        if step is None or not step.counts:
            return
        while step.unused:
            parameter = step.unused.pop()
            place = self._places.get(parameter, None)
            if place is not None:
                for residual in place.bucket.both:
                    residual.keep_last(place.start, place.length)
        for bucket in self._written:
            for residual in bucket.both:
                if residual.next is not None:
                    yield residual, step.outcome.any_not_finite(residual.next.device)

    def _bucket_of(self, owners: Sequence[Owner]) -> BucketResiduals | None:
        """Return the bucket that these owners were in, in this order and without others."""
        bucket, start = None, 0
        for owner in owners:
            place = self._places.get(owner, None)
            if place is None or (place.start, place.length) != (start, owner_length(owner)):
                return None
            if bucket is not None and place.bucket is not bucket:
                return None
            bucket = place.bucket
            start += place.length
        return bucket if bucket is not None and bucket.count == start else None

    def _move(self, owners: Sequence[Owner], bucket: BucketResiduals) -> None:
        """Copy the owners' residuals from where they are, and forget them there."""
        start = 0
        for owner in owners:
            length = owner_length(owner)
            old = self._places.get(owner, None)
            if old is not None:
                for residual, other in zip(bucket.both, old.bucket.both, strict=True):
                    if old.length == length:  # else a parameter was resized
                        self._dropped += residual.take(other, old.start, length, start)
                    other.next = None  # no step will write it
            self._places[owner] = _Place(bucket, start, length)
            start += length
