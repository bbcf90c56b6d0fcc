"""Error feedback: what quantisation lost of a step's gradients, added to the next step's."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["BucketResiduals", "Residual", "Residuals"]

_log = logging.getLogger(__name__)

BucketKey = tuple[tuple[int, int], ...]
"""The parameters of a bucket: (number of the parameter, number of elements) of each."""

_STEPS_UNUSED = 3
"""A bucket that has not come for so many steps is one that DDP has rebuilt: it does so after the first."""


@dataclass
class Residual:
    """Two tensors in turns: what the last finite step lost, and what this step loses.

    ``None`` twice where nothing is kept.
    """

    last: torch.Tensor | None = None
    next: torch.Tensor | None = None

    def span(self, start: int, length: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return elements ``start`` to ``start + length`` of both."""
        if self.last is None or self.next is None:
            return None, None
        return self.last[start : start + length], self.next[start : start + length]

    def turn_unless(self, failed: torch.Tensor) -> None:
        """Make what this step lost the last loss unless it failed. An accelerator is told, not asked."""
        if self.last is None or self.next is None:
            return
        if failed.device.type != "cpu":
            torch.where(failed, self.last, self.next, out=self.last)
        elif not failed:
            self.last, self.next = self.next, self.last


@dataclass
class BucketResiduals:
    """What is kept for one bucket."""

    own: Residual
    shard: Residual
    step: int

    def fits(self, lengths: tuple[int, int]) -> bool:
        """Tell whether as many elements are kept as there are: ranks cut a bucket by how many they are."""
        return all(
            kept.last is None or kept.last.numel() == length
            for kept, length in zip((self.own, self.shard), lengths, strict=True)
        )

    def to(self, device: torch.device) -> None:
        """Move what is kept to ``device``: it may come from a file."""
        for kept in (self.own, self.shard):
            if kept.last is not None and kept.next is not None and kept.last.device != device:
                kept.last, kept.next = kept.last.to(device), kept.next.to(device)


class _Flags:
    """Flags that were raised on several devices and streams."""

    def __init__(self, flags: list[torch.Tensor]) -> None:
        self._flags = flags
        self._any: dict[torch.device, torch.Tensor] = {}

    def any_on(self, device: torch.device) -> torch.Tensor:
        """Return on ``device`` whether one is raised."""
        if device not in self._any:
            for flag in self._flags:
                if flag.device.type != "cpu":  # made on a side stream, whose memory it is
                    flag.record_stream(torch.get_device_module(flag.device).current_stream(flag.device))
            here = [flag.to(device, non_blocking=True) for flag in self._flags]
            none = torch.zeros((), dtype=torch.bool, device=device)
            self._any[device] = torch.stack([none, *here]).any()
        return self._any[device]


class Residuals:
    """The residuals of all buckets, in fp32, on this rank.

    A step counts only as a whole: if a value of any bucket's mean was not finite the optimizer will skip
    it, and all residuals stay as they were. So both what the last step lost and what the running step
    loses are kept.

    A bucket is known by its parameters: as objects while a job runs, by their names in a file. When DDP
    rebuilds its buckets, after the first step, a residual finds no bucket any more and is dropped; none is
    ever applied to other parameters.

    Args:
        own: Keep what a rank's own gradients lose.
        shard: Keep what the means of its shards lose.
    """

    def __init__(self, *, own: bool, shard: bool) -> None:
        self._wants = own, shard
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._count = 0
        self._buckets: dict[BucketKey, BucketResiduals] = {}
        self._flags: list[torch.Tensor] = []
        self._broken = False
        self._settled = True
        self._step = 0

    def begin_step(self) -> None:
        """End the last step, and begin one."""
        self.settle()
        self._settled = False
        self._step += 1

    def of_bucket(
        self, parameters: Sequence[torch.Tensor], *, own: int, shard: int, device: torch.device
    ) -> BucketResiduals:
        """Return what is kept for a bucket, zeros if it is new.

        Args:
            parameters: Of the bucket, in its order.
            own: Number of elements of this rank's own gradients.
            shard: Number of elements of this rank's shards.
            device: Where to.
        """
        if not any(self._wants):
            return BucketResiduals(Residual(), Residual(), self._step)
        key, lengths = self._key(parameters), (own, shard)
        found = self._buckets.get(key)
        if found is None or not found.fits(lengths):
            own_kept, shard_kept = (
                _zeros(length, device) if wanted else Residual()
                for wanted, length in zip(self._wants, lengths, strict=True)
            )
            found = self._buckets[key] = BucketResiduals(own_kept, shard_kept, self._step)
        found.step = self._step
        found.to(device)
        return found

    def failed(self, flag: torch.Tensor) -> None:
        """Note whether a value of this step's means is not finite, as a flag on any device."""
        if any(self._wants):
            self._flags.append(flag)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note an error: a step that raises will not be made."""
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def settle(self) -> None:
        """End the last step: keep what it lost if it was finite. Its exchanges must be over."""
        if self._settled:
            return
        self._settled = True
        broken, failed = self._broken, _Flags(self._flags)
        self._flags, self._broken = [], False
        for key, kept in list(self._buckets.items()):
            if kept.step == self._step and not broken:
                for residual in (kept.own, kept.shard):
                    if residual.last is not None:
                        residual.turn_unless(failed.any_on(residual.last.device))
            elif kept.step + _STEPS_UNUSED <= self._step:
                del self._buckets[key]
                _log.info("dropped the residuals of a bucket of %d parameters: DDP has rebuilt it", len(key))

    def state_dict(self, names: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return what is kept, as CPU tensors by bucket, of the parameters of these names."""
        self.settle()
        name_of = {self._number(parameter): name for name, parameter in names.items()}
        return {
            "buckets": [
                {
                    "parameters": [(name_of[number], length) for number, length in key],
                    "own": _on_cpu(kept.own),
                    "shard": _on_cpu(kept.shard),
                }
                for key, kept in self._buckets.items()
                if all(number in name_of for number, _ in key)
            ]
        }

    def load_state_dict(self, state: dict[str, Any], names: Mapping[str, torch.Tensor]) -> None:
        """Take over what another run kept; until DDP has rebuilt its buckets it waits to be found again."""
        self.settle()
        buckets: dict[BucketKey, BucketResiduals] = {}
        for bucket in state["buckets"]:
            for name, length in bucket["parameters"]:
                if name not in names or names[name].numel() != length:
                    here = "not there" if name not in names else f"{names[name].numel()} long here"
                    raise ValueError(
                        f"the residuals are of a parameter {name!r} of {length} elements, {here}"
                    )
            key = tuple((self._number(names[name]), length) for name, length in bucket["parameters"])
            buckets[key] = BucketResiduals(_loaded(bucket["own"]), _loaded(bucket["shard"]), self._step)
        self._buckets = buckets

    def _number(self, parameter: torch.Tensor) -> int:
        if parameter not in self._numbers:
            self._numbers[parameter] = self._count  # never used again, unlike the parameter's address
            self._count += 1
        number: int = self._numbers[parameter]
        return number

    def _key(self, parameters: Sequence[torch.Tensor]) -> BucketKey:
        return tuple((self._number(parameter), parameter.numel()) for parameter in parameters)


def _zeros(length: int, device: torch.device) -> Residual:
    last, following = (torch.zeros(length, dtype=torch.float32, device=device) for _ in range(2))
    return Residual(last, following)


def _on_cpu(kept: Residual) -> torch.Tensor | None:
    return None if kept.last is None else kept.last.detach().cpu().clone()


def _loaded(last: torch.Tensor | None) -> Residual:
    if last is None:
        return Residual()
    last = last.to(dtype=torch.float32, copy=True)
    return Residual(last, torch.zeros_like(last))
