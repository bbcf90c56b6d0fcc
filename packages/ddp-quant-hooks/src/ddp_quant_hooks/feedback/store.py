"""The residuals of a state: where each owner's are, and which step changes them."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp_quant_hooks.feedback.residuals import (
    BucketResiduals,
    Key,
    Owner,
    OwnerResiduals,
    Residual,
    Slot,
    owner_length,
    value_order,
)
from ddp_quant_hooks.feedback.step import Kind, Step
from dist_utils import torch_compat
from dist_utils.comm_hooks import Bucket

_log = logging.getLogger(__name__)


class _Member(NamedTuple):
    """An owner as one of a bucket's.

    Attributes:
        bucket: The bucket in which its values came last.
        number: Its place in the order of the bucket's owners.
        order: The order of its values there; see :func:`value_order`.
    """

    bucket: BucketResiduals
    number: int
    order: tuple[int, ...]

    @property
    def length(self) -> int:
        """How many values it had there."""
        return self.bucket.starts[self.number + 1] - self.bucket.starts[self.number]


class Feedback:
    """The residuals of a state, and the step that is adding to them.

    Which slots a bucket has, and which of its values they cover, is up to who averages it. When an owner
    comes in another bucket, or its values are covered by other spans, what both have in common is copied and
    the rest dropped, with a line in the log. All of it is dropped if its values come in another order, as
    after ``to(memory_format=...)``. A bucket is freed when all its owners are elsewhere or gone.

    A step is finished when the next one begins: its rounding errors are kept if it ended well, all its means
    were finite, and the user has not discarded it.

    Args:
        kept: The names of the slots that are kept; others are left out of every bucket.
        wait: Returns when all jobs so far have run. Its owner is not kept alive.
    """

    def __init__(self, kept: Collection[str], *, wait: Callable[[], None]) -> None:
        self._kept = frozenset(kept)
        self._wait = weakref.WeakMethod(wait)
        self.keys: dict[str, Key] = {}
        """The keys that have been used, by name."""
        self.origin = "none"
        """Where residuals were loaded from, in words that are identical on all ranks."""
        self.loads = 0
        """How often they were loaded."""
        self._members: Any = WeakIdKeyDictionary()
        self._step: Step | None = None
        self._block: Step | None = None
        self._written: list[BucketResiduals] = []  # by the step
        self._dropped = 0
        self._steps = 0
        self._uncounted = Step(Kind.CALL)

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return bool(self._kept)

    def begin_bucket(self, bucket: Bucket) -> Step:
        """Return the step that a bucket belongs to; the first of a step finishes the one before.

        Call it on the caller's thread, with every bucket that DDP hands over.
        """
        if not self.wanted:
            return self._uncounted
        if self.step_is_open:
            raise ValueError("step() is for plain tensors: each backward() of a model's buckets is a step")
        task, step = torch_compat.graph_task_id(), self._step
        if step is None or not step.includes_bucket(task, bucket.index()):
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
            return self._uncounted
        task, step = torch_compat.graph_task_id(), self._step
        if step is None or not step.includes_call(task):
            step = self._begin(Kind.CALL)
        step.add_call(task)
        return step

    def residuals(
        self, step: Step, owners: Sequence[Owner], slots: Mapping[str, Slot], device: torch.device
    ) -> BucketResiduals:
        """Return what is kept for the owners of a bucket; zeros, or as the slot fills it, where nothing is.

        Args:
            step: The running step, which writes all of it.
            owners: The parameters of the bucket, or keys, in its order.
            slots: What this rank keeps of it, by name.
            device: Where.

        Raises:
            ValueError: The owners are keys, and other residuals are of parameters, or the other way round.
        """
        if step is not self._step:
            return BucketResiduals()  # nothing is kept
        first = next(iter(self._members), owners[0])
        if isinstance(first, Key) != isinstance(owners[0], Key):
            raise ValueError(
                "a state with error feedback is for a model's buckets or for plain tensors, not for both: "
                "make one for each"
            )
        self.keys.update({owner.name: owner for owner in owners if isinstance(owner, Key)})
        slots = {name: slot for name, slot in slots.items() if name in self._kept and slot.spans}
        bucket = self._bucket_of(owners)
        if bucket is None or not bucket.fits(slots, device):
            bucket = BucketResiduals.of_slots([*map(owner_length, owners)], slots, device)
            self._move(owners, bucket)
        self._written.append(bucket)
        return bucket

    def key_of(self, name: str, tensor: torch.Tensor) -> Key:
        """Return the known key of this name, or a new one, which becomes known with its first residuals."""
        known = self.keys.get(name)
        if known is None:
            return Key.of(name, tensor)
        known.shape, known.is_complex = tensor.shape, tensor.is_complex()  # of as many values as before
        return known

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
            self._members.pop(known, None)

    def discard(self) -> None:
        """Discard the last step: it changes no residuals."""
        if self._step is not None:
            self._step.discard()

    def drop_failed_step(self) -> None:
        """Let what comes next not be taken for a part of a backward pass that raised.

        Where the pass goes on, as ``close()`` was called inside it, it is one step to its end.
        """
        if self._step is not None:
            self._step.take_no_more_passes()

    @property
    def steps(self) -> int:
        """The number of steps that count, including the last one."""
        return self._steps + (self._step is not None and self._step.counts)

    def skip_steps(self, count: int) -> None:
        """Count steps that have failed here but counted on other ranks: averages may depend on how many."""
        self._steps += count

    @property
    def step_is_open(self) -> bool:
        """Whether a step of plain tensors is open."""
        return self._block is not None and self._block.open

    def snapshot(self) -> Iterator[tuple[Owner, OwnerResiduals]]:
        """Yield the owners and their residuals as of the last step that counts. All jobs must have run."""
        written = {id(residual) for residual, failed in self._written_residuals() if not failed}
        unused = set() if self._step is None else {*map(id, self._step.unused)}
        for owner, member in self._members.items():
            if member.length != owner_length(owner):
                continue  # a parameter was resized
            kept = {}
            for name, residual in member.bucket.slots.items():
                new = residual.next if id(residual) in written and id(owner) not in unused else None
                kept[name] = residual.of(member.number, residual.last if new is None else new)
            slots = {name: slot for name, slot in kept.items() if slot.pieces}
            yield owner, OwnerResiduals(member.order, slots)

    def forget(self, steps: int = 0) -> None:
        """Start over as if nothing had been lost so far, in so many steps. All jobs must have run."""
        self._members, self.keys = WeakIdKeyDictionary(), {}
        self._step, self._written = None, []
        self.origin, self._steps = "none", steps

    def multiply(self, factor: float) -> None:
        """Multiply all that is kept, and what the last step has written. All jobs must have run."""
        buckets = {id(member.bucket): member.bucket for member in self._members.values()}
        for bucket in buckets.values():
            for residual in bucket.slots.values():
                residual.last *= factor
                if residual.next is not None:
                    residual.next *= factor

    def load(self, residuals: Sequence[tuple[Owner, OwnerResiduals]], steps: int) -> None:
        """Replace everything with copies of saved residuals. All jobs must have run."""
        loaded = [
            (owner, _Member(BucketResiduals.of_owner(owner_length(owner), kept.slots), 0, kept.order))
            for owner, kept in residuals
        ]
        self.forget(steps)
        for owner, member in loaded:
            self._members[owner] = member
            if isinstance(owner, Key):
                self.keys[owner.name] = owner
        self.origin = f"of {'keys' if self.keys else 'parameters'} in step {steps}"
        self.loads += 1

    def _begin(self, kind: Kind) -> Step:
        """Begin a step, and finish the one before."""
        ended, wait = self._step, self._wait()
        if ended is not None and (ended.outside or ended.kind is not Kind.BACKWARD) and wait is not None:
            wait()  # DDP has waited for the others' jobs
        self._settle()
        self._steps = self.steps
        if self._dropped:
            _log.info(
                "dropped the residuals of %d values, which come in other buckets, shards or orders now",
                self._dropped,
            )
        self._step, self._written, self._dropped = Step(kind), [], 0
        return self._step

    def _settle(self) -> None:
        """Keep what the last step has written if it counts, but not of parameters that no rank has used."""
        step = self._step
        if step is None or not step.counts:
            return
        for parameter in step.unused:
            member = self._members.get(parameter, None)
            for residual in () if member is None else member.bucket.slots.values():
                residual.keep_last(member.number)
        for residual, failed in self._written_residuals():
            residual.keep_unless(failed)

    def _written_residuals(self) -> Iterator[tuple[Residual, torch.Tensor]]:
        """Yield what the last step has written if it counts, each with whether a mean was not finite."""
        step = self._step
        if step is None or not step.counts:
            return
        for bucket in self._written:
            for residual in bucket.slots.values():
                if residual.next is not None:
                    yield residual, step.outcome.any_not_finite(residual.next.device)

    def _bucket_of(self, owners: Sequence[Owner]) -> BucketResiduals | None:
        """Return the bucket that these owners were in, in this order, without others and as they are now."""
        bucket = None
        for number, owner in enumerate(owners):
            member = self._members.get(owner, None)
            if member is None or (bucket is not None and member.bucket is not bucket):
                return None
            here = number, owner_length(owner), value_order(owner)
            if (member.number, member.length, member.order) != here:
                return None
            bucket = member.bucket
        return bucket if bucket is not None and len(bucket.starts) == len(owners) + 1 else None

    def _move(self, owners: Sequence[Owner], bucket: BucketResiduals) -> None:
        """Copy the owners' residuals from where they are, and forget them there."""
        for number, owner in enumerate(owners):
            member, old = _Member(bucket, number, value_order(owner)), self._members.get(owner, None)
            if old is not None:
                self._dropped += old.bucket.kept(old.number)
                if (old.length, old.order) == (member.length, member.order):
                    self._dropped -= bucket.take(number, old.bucket, old.number)
                old.bucket.freeze()
            self._members[owner] = member
