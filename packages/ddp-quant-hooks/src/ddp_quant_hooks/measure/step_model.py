"""A simulated DDP step: buckets become ready during backward, and are sent one after another."""

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
    """The cost of averaging a bucket.

    Attributes:
        size: In bytes.
        alone: Seconds when nothing else is computed.
        beside: Seconds while backward computes.
        lost: The seconds by which that slows backward.
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
        contention: The seconds by which communication slows backward.
        copying: Time to copy gradients into buckets, and averages back.
    """

    seconds: float
    exposed: float
    contention: float
    copying: float


def bucket_sizes(parameters: int) -> list[int]:
    """Return the bytes of the buckets of a model with this number of fp32 parameters, in their order.

    As DDP makes them if no parameter is large: 1 MiB, then 25 MiB each, then the rest.
    """
    left = 4 * parameters
    sizes: list[int] = []
    while left > 0:
        sizes.append(min(left, _BUCKET if sizes else _FIRST_BUCKET))
        left -= sizes[-1]
    return sizes


def play_step(compute: float, buckets: Sequence[BucketCost], copy_per_byte: float = 0.0) -> StepTimes:
    """Return the times of a step whose buckets are sent while backward computes.

    A bucket is ready when the finished share of backward equals the share of the model in it and the buckets
    before it.

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
