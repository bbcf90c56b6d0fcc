"""A DDP step, played through: buckets become ready during backward, and travel one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BACKWARD_SHARE", "BucketCost", "StepTimes", "bucket_sizes", "play_step"]

BACKWARD_SHARE = 2 / 3
"""Share of a step without communication: backward computes two products where forward computes one."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""DDP's own defaults, in bytes."""


@dataclass(frozen=True)
class BucketCost:
    """What averaging a bucket takes.

    Attributes:
        size: In bytes.
        alone: Seconds when nothing else is computed.
        beside: Seconds while backward computes.
        lost: By how many seconds that slows backward.
    """

    size: int
    alone: float
    beside: float
    lost: float


@dataclass(frozen=True)
class StepTimes:
    """A whole step, in seconds.

    Attributes:
        seconds: From its beginning to its end.
        exposed: The part of it that is communication after backward.
        contention: By how much communication slows backward.
        copying: Time to copy gradients into buckets, and averages back.
    """

    seconds: float
    exposed: float
    contention: float
    copying: float


def bucket_sizes(parameters: int) -> list[int]:
    """Return the bytes of the buckets of a model with so many fp32 parameters, in their order.

    As DDP makes them if no parameter is large: 1 MiB, then 25 MiB each, then the rest.
    """
    left = 4 * parameters
    sizes: list[int] = []
    while left > 0:
        sizes.append(min(left, _BUCKET if sizes else _FIRST_BUCKET))
        left -= sizes[-1]
    return sizes


def play_step(compute: float, buckets: Sequence[BucketCost], copy_per_byte: float = 0.0) -> StepTimes:
    """Return what a step takes whose buckets are sent while backward computes.

    A bucket is ready when as large a share of backward is done as it and those before it are of the model.

    Args:
        compute: Seconds of a step without communication.
        buckets: In their order.
        copy_per_byte: Seconds for copying a byte, which DDP does into a bucket during backward, and out of
            it at the end.
    """
    total, so_far = sum(bucket.size for bucket in buckets), 0
    copying = total * copy_per_byte
    backward = compute * BACKWARD_SHARE + copying
    now = done = 0.0  # since backward began, and how much of it is done
    ends = backward  # when backward ends, if nothing more is sent
    for bucket in buckets:
        so_far += bucket.size
        ready = backward * so_far / total
        if done < ready:  # nothing is sent meanwhile
            now, done = now + ready - done, ready
        overlapped = 0.0
        if (left := backward - done) > 0 and bucket.beside > 0:
            speed = 1 - bucket.lost / bucket.beside
            overlapped = min(bucket.beside, left / speed if speed > 0 else bucket.beside)
            now, done = now + overlapped, done + overlapped * speed
            ends = now + backward - done
            overlapped /= bucket.beside
        now += (1 - overlapped) * bucket.alone
    now = max(now, ends)
    seconds = compute * (1 - BACKWARD_SHARE) + now + copying
    return StepTimes(seconds, now - ends, ends - backward, 2 * copying)
