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
"""bf16 keeps 8 significant bits: of a step's rounding error, at most 2^-8 is lost for good, with a random
sign. If steps lose at most R (half a quantization step, of a block that is not rotated), the mean of T steps
is wrong by at most R (1 / T + 2^-8). fp16 lacks the range: the rounding errors of gradients of 1e-7 become
zero in it, and those of loss-scaled gradients infinite."""

BucketKey = tuple[tuple[int, int], ...]
"""The parameters of a bucket: (number of the parameter, number of values) of each."""


@dataclass
class Residual:
    """Two tensors that swap roles: rounding errors of the last step that counts, and of the running pass.

    Both are ``None`` where nothing is kept.
    """

    last: torch.Tensor | None = None
    next: torch.Tensor | None = None

    @classmethod
    def zeros(cls, length: int, device: torch.device) -> Residual:
        """Return a residual of ``length`` zeros."""
        last, following = (torch.zeros(length, dtype=RESIDUAL_DTYPE, device=device) for _ in range(2))
        return cls(last, following)

    def span(self, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return elements ``start`` to ``start + length`` of both."""
        if self.last is None or self.next is None:
            return None, None
        return self.last[start : start + length], self.next[start : start + length]

    def keep_unless(self, failed: torch.Tensor) -> None:
        """Keep this pass's rounding errors unless it failed. On an accelerator this does not block."""
        if self.last is None or self.next is None:
            return
        if failed.device.type != "cpu":
            torch.where(failed, self.last, self.next, out=self.last)
        elif not failed:
            self.last, self.next = self.next, self.last

    def keep(self, unused: Sequence[UnusedPart], spans: Sequence[Span]) -> None:
        """Keep the earlier residuals of parameters that got no gradient: their averages were discarded.

        Args:
            unused: Parameters that had no gradient before, and where they are in the bucket.
            spans: The values of the bucket that this residual covers, in the bucket's order.
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
        """Move to ``device``; a loaded residual may be elsewhere."""
        if self.last is not None and (self.next is None or self.last.device != device):
            self.last = self.last.to(device)
            self.next = torch.zeros_like(self.last)


@dataclass
class BucketResiduals:
    """The residuals of one bucket.

    Attributes:
        own: Rounding errors of this rank's own gradients.
        shard: Rounding errors of the means of this rank's shards.
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
    """The buckets, where each parameter's own residual is, and which bucket each parameter is in."""

    buckets: dict[BucketKey, BucketResiduals]
    own_of: dict[int, OwnPart]
    bucket_of: dict[int, BucketKey]


class Residuals:
    """The residuals of all buckets, in bf16, on this rank.

    A rank's own residuals belong to parameters. They lie in one flat pair of tensors for each bucket; a
    bucket with another list of parameters, as DDP makes them after the first step, gets a pair of its own and
    copies each parameter's residual from its old place. A parameter that does not arrive keeps its residual
    until it does.

    The residuals of shards belong to buckets: which values of a bucket a rank averages depends on all of
    them. They are dropped, with a line in the log, when a parameter arrives in another bucket.

    Args:
        own: Keep the rounding errors of a rank's own gradients.
        shard: Keep the rounding errors of the means of its shards.
        own_in_buckets: A rank's own residuals belong to shards, too: in a grid of nodes, to those inside its
            node.
    """

    def __init__(self, *, own: bool, shard: bool, own_in_buckets: bool = False) -> None:
        self.wants_own, self.wants_shard, self.own_in_buckets = own, shard, own_in_buckets
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self.buckets: dict[BucketKey, BucketResiduals] = {}
        """The buckets in which parameters last arrived."""
        self.own_of: dict[int, OwnPart] = {}
        """Keyed by the number of the parameter."""
        self._bucket_of: dict[int, BucketKey] = {}
        self._before: _Places | None = None  # set if the running pass moved some

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
        """Return where everything is if the running pass ended well, and otherwise where it was before."""
        if ended_well or self._before is None:
            return _Places(self.buckets, self.own_of, self._bucket_of)
        return self._before

    def plain_bucket(self, parameters: Sequence[torch.Tensor], position: int) -> None:
        """Note a bucket that is averaged without compression: it has parameters, but no rounding errors."""
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
        """Return the residuals of a bucket, zeros if it is new.

        Args:
            parameters: The parameters of the bucket, in its order.
            position: The position of the bucket.
            own: Number of values that this rank sends as its own.
            shard: Number of values of this rank's shards; ``None`` if it has none to send on.
            device: The device of the residuals.
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
        """Replace everything with saved residuals.

        Args:
            own: Pairs of a parameter and the residual of this rank's gradient.
            buckets: In order: the parameters of a bucket, and its residuals, own and of shards.
        """
        self.buckets, self._bucket_of, self.own_of = {}, {}, {}
        for parameter, lost in own:
            self.own_of[self.number(parameter)] = OwnPart(_loaded(lost), 0, lost.numel())
        for position, (parameters, bound, shard) in enumerate(buckets):
            _, kept = self._bucket(parameters, position)
            kept.own, kept.shard = _loaded(bound), _loaded(shard)
        self._before = None

    def commit(self, ended: BackwardPass) -> None:
        """Keep the rounding errors of a pass if a step could follow it, otherwise those before it. Once."""
        self.buckets, self.own_of, self._bucket_of = self.places(ended_well=ended.complete)
        self._before = None
        if not ended.counts:
            return
        for kept in ended.kept:
            for residual in (kept.own, kept.shard):
                if residual.last is not None:
                    residual.keep_unless(ended.outcome.any_not_finite(residual.last.device))

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
