"""Residuals: the rounding errors of gradients, and the parameters that they belong to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ddp_quant_hooks.chunks import Span
from ddp_quant_hooks.passes import BackwardPass, UnusedPart, value_count

__all__ = ["RESIDUAL_DTYPE", "BucketKey", "BucketResiduals", "Residual", "Residuals"]

_log = logging.getLogger(__name__)

RESIDUAL_DTYPE = torch.bfloat16
"""bf16 keeps 8 significant bits: of what a training step loses, at most 2^-8 is lost for good, with a random
sign. If steps lose at most R (half a quantization step, of a block that is not rotated), the mean of T steps
is wrong by at most R (1 / T + 2^-8). fp16 has not the range: what gradients of 1e-7 lose is zero in it, and
what loss-scaled ones lose is infinite."""

BucketKey = tuple[tuple[int, int], ...]
"""The parameters of a bucket: (number of the parameter, number of values) of each."""


@dataclass
class Residual:
    """Two tensors in turns: what the last step lost that counts, and what the running pass loses.

    ``None`` twice where nothing is kept.
    """

    last: torch.Tensor | None = None
    next: torch.Tensor | None = None

    @classmethod
    def zeros(cls, length: int, device: torch.device) -> Residual:
        """Return a residual of ``length`` values of which nothing is lost yet."""
        last, following = (torch.zeros(length, dtype=RESIDUAL_DTYPE, device=device) for _ in range(2))
        return cls(last, following)

    def span(self, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return elements ``start`` to ``start + length`` of both."""
        if self.last is None or self.next is None:
            return None, None
        return self.last[start : start + length], self.next[start : start + length]

    def turn_unless(self, failed: torch.Tensor) -> None:
        """Make what this pass lost the last loss unless it failed. An accelerator is told, not asked."""
        if self.last is None or self.next is None:
            return
        if failed.device.type != "cpu":
            torch.where(failed, self.last, self.next, out=self.last)
        elif not failed:
            self.last, self.next = self.next, self.last

    def keep(self, unused: Sequence[UnusedPart], spans: Sequence[Span]) -> None:
        """Lose nothing new of parameters that got no gradient: what was sent of them was thrown away.

        Args:
            unused: Parameters that had no gradient before, and where they are in the bucket.
            spans: Of which values of the bucket this is, in its order.
        """
        if self.last is None or self.next is None:
            return
        start = 0
        for span in spans:
            for parameter, part in unused:
                low, high = max(span.start, part.start), min(span.stop, part.stop)
                if low < high and parameter.grad is None:
                    here = slice(start + low - span.start, start + high - span.start)
                    self.next[here] = self.last[here]
            start += len(span)

    def to(self, device: torch.device) -> None:
        """Move to ``device``: it may come from a file."""
        if self.last is not None and (self.next is None or self.last.device != device):
            self.last = self.last.to(device)
            self.next = torch.zeros_like(self.last)


@dataclass
class BucketResiduals:
    """What is kept for one bucket.

    Attributes:
        own: What this rank's own gradients lose.
        shard: What the means of this rank's shards lose.
        position: The position of the bucket among the model's.
    """

    own: Residual = field(default_factory=Residual)
    shard: Residual = field(default_factory=Residual)
    position: int = 0

    def keep(self, unused: Sequence[UnusedPart], own: Sequence[Span], shard: Sequence[Span]) -> None:
        """See :meth:`Residual.keep`."""
        self.own.keep(unused, own)
        self.shard.keep(unused, shard)


class OwnPart(NamedTuple):
    """Where a parameter's own residual is."""

    residual: Residual
    start: int
    length: int


class _Places(NamedTuple):
    """Which buckets there are, and where parameters are: their own residuals, and they themselves."""

    buckets: dict[BucketKey, BucketResiduals]
    own_of: dict[int, OwnPart]
    bucket_of: dict[int, BucketKey]


class Residuals:
    """The residuals of all buckets, in bf16, on this rank.

    A rank's own residuals belong to parameters. They lie in one flat pair of tensors for each bucket; a
    bucket with another list of parameters, as DDP makes them after the first step, gets a pair of its own
    and takes each parameter's residual over from where it is. A parameter that does not come keeps its
    residual until it comes again.

    The residuals of shards belong to buckets: which values of a bucket a rank averages depends on all of
    them. They are dropped, with a line in the log, when a parameter comes in another bucket.

    Args:
        own: Keep what a rank's own gradients lose.
        shard: Keep what the means of its shards lose.
        own_in_buckets: What a rank loses itself is of shards, too: inside a node, in a grid of nodes.
    """

    def __init__(self, *, own: bool, shard: bool, own_in_buckets: bool = False) -> None:
        self.wants_own, self.wants_shard, self.own_in_buckets = own, shard, own_in_buckets
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self.buckets: dict[BucketKey, BucketResiduals] = {}
        """The buckets in which parameters came last."""
        self.own_of: dict[int, OwnPart] = {}
        """By the number of the parameter."""
        self._bucket_of: dict[int, BucketKey] = {}
        self._before: _Places | None = None  # the running pass moved some

    @property
    def wanted(self) -> bool:
        """Whether anything is kept."""
        return self.wants_own or self.wants_shard

    def number(self, parameter: torch.Tensor) -> int:
        """Return a number that no other parameter has ever had, unlike its address."""
        if parameter not in self._numbers:
            self._numbers[parameter] = self._count
            self._count += 1
        number: int = self._numbers[parameter]
        return number

    def parameters(self) -> dict[int, torch.Tensor]:
        """Return the parameters that still exist, by their numbers."""
        return {number: parameter for parameter, number in self._numbers.items()}  # type: ignore[no-untyped-call]

    def places(self, *, ended_well: bool) -> _Places:
        """Return where everything is if the running pass has ended well, or else where it was before it."""
        if ended_well or self._before is None:
            return _Places(self.buckets, self.own_of, self._bucket_of)
        return self._before

    def plain_bucket(self, parameters: Sequence[torch.Tensor], position: int) -> None:
        """Note a bucket that is averaged without compression: it loses nothing, but parameters are in it."""
        self._bucket(parameters, position)

    def of_bucket(
        self,
        parameters: Sequence[torch.Tensor],
        position: int,
        *,
        own: int,
        shard: int | None,
        device: torch.device,
    ) -> BucketResiduals:
        """Return what is kept for a bucket, zeros if it is new.

        Args:
            parameters: The parameters of the bucket, in its order.
            position: The position of the bucket.
            own: Number of values that this rank sends as its own.
            shard: Number of values of this rank's shards; ``None`` if it has none to send on.
            device: Where to.
        """
        key, kept = self._bucket(parameters, position)
        if self.wants_own and (kept.own.last is None or kept.own.last.numel() != own):
            kept.own = Residual.zeros(own, device)
            if not self.own_in_buckets:
                self._take_over(key, kept.own)
        if (
            self.wants_shard
            and shard is not None
            and (kept.shard.last is None or kept.shard.last.numel() != shard)
        ):
            kept.shard = Residual.zeros(shard, device)
        kept.own.to(device)
        kept.shard.to(device)
        return kept

    def load(
        self,
        own: Sequence[tuple[torch.Tensor, torch.Tensor]],
        buckets: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor | None, torch.Tensor | None]],
    ) -> None:
        """Forget everything, and keep what was saved.

        Args:
            own: Parameters, with what this rank's gradients of them have lost.
            buckets: In their order: the parameters, and what belongs to the bucket, own and of shards.
        """
        self.buckets, self._bucket_of, self.own_of = {}, {}, {}
        for parameter, lost in own:
            self.own_of[self.number(parameter)] = OwnPart(_loaded(lost), 0, lost.numel())
        for position, (parameters, bound, shard) in enumerate(buckets):
            _, kept = self._bucket(parameters, position)
            kept.own, kept.shard = _loaded(bound), _loaded(shard)
        self._before = None

    def commit(self, ended: BackwardPass) -> None:
        """Keep what a pass lost, if a step could follow; otherwise what was lost before it. Once."""
        self.buckets, self.own_of, self._bucket_of = self.places(ended_well=ended.complete)
        self._before = None
        if not ended.counts:
            return
        for kept in ended.kept:
            for residual in (kept.own, kept.shard):
                if residual.last is not None:
                    residual.turn_unless(ended.outcome.any_not_finite(residual.last.device))

    def _bucket(self, parameters: Sequence[torch.Tensor], position: int) -> tuple[BucketKey, BucketResiduals]:
        key = tuple((self.number(parameter), value_count(parameter)) for parameter in parameters)
        kept = self.buckets.get(key)
        if kept is None:
            if self._before is None:
                self._before = _Places(self.buckets.copy(), self.own_of.copy(), self._bucket_of.copy())
            self._forget_dead()
            for split in {self._bucket_of.get(number) for number, _ in key}:
                if split is not None:
                    self._drop(split)
            self._bucket_of.update((number, key) for number, _ in key)
            kept = self.buckets[key] = BucketResiduals()
        kept.position = position
        return key, kept

    def _take_over(self, key: BucketKey, flat: Residual) -> None:
        """Copy each parameter's own residual from where it is."""
        assert flat.last is not None
        start = 0
        for number, length in key:
            part = self.own_of.get(number)
            if part is not None and part.length == length and part.residual.last is not None:
                flat.last[start : start + length] = part.residual.last[part.start : part.start + length]
            self.own_of[number] = OwnPart(flat, start, length)
            start += length

    def _drop(self, key: BucketKey) -> None:
        dropped = self.buckets.pop(key, None)
        if dropped is None:
            return
        bound = [dropped.shard, dropped.own] if self.own_in_buckets else [dropped.shard]
        if any(residual.last is not None and residual.last.numel() for residual in bound):
            _log.info(
                "dropped the residuals of the shards of a bucket of %d parameters, which come in other "
                "buckets now",
                len(key),
            )

    def _forget_dead(self) -> None:
        alive = set(self._numbers.values())  # type: ignore[no-untyped-call]
        for key in list(self.buckets):
            if not all(number in alive for number, _ in key):
                del self.buckets[key]
        self._bucket_of = {number: key for number, key in self._bucket_of.items() if number in alive}
        self.own_of = {number: part for number, part in self.own_of.items() if number in alive}


def _loaded(saved: torch.Tensor | None) -> Residual:
    return Residual() if saved is None else Residual(saved.detach().to(dtype=RESIDUAL_DTYPE, copy=True))
