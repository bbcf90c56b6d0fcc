"""Estimate from the measurements how long a training step of a model takes with each hook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_quant_hooks.measure.trials import Exchange, Hooks

_BACKWARD_SHARE = 2 / 3
"""Share of a step without communication: backward computes two products where forward computes one."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""DDP's own defaults, in bytes."""
_MOST_PARAMETERS = 10**12
"""More than any rank can hold. A limit is needed because every bucket is simulated."""


@dataclass(frozen=True)
class Model:
    """What an estimate needs to know about a model.

    Attributes:
        parameters: The number of parameters, at most 1e12; gradients are fp32.
        step_seconds: Seconds of a training step without communication, as under ``no_sync()``, while all
            ranks compute.
    """

    parameters: int
    step_seconds: float

    def __post_init__(self) -> None:
        if not isinstance(self.parameters, int):
            raise TypeError(f"parameters must be a whole number, got {self.parameters!r}")
        if not 0 < self.parameters <= _MOST_PARAMETERS:
            raise ValueError(f"parameters must be positive and at most 1e12, got {self.parameters}")
        if not 0 < self.step_seconds < math.inf:
            raise ValueError(f"step_seconds must be positive and finite, got {self.step_seconds}")


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


@dataclass(frozen=True)
class Estimate:
    """Whole steps of a model, estimated.

    Attributes:
        model: The model.
        steps: Times of a step, by the name of the hook.
    """

    model: Model
    steps: dict[str, StepTimes]


def estimate_steps(hooks: Hooks, model: Model, copy_per_byte: float = 0.0) -> Estimate:
    """Return the estimated times of a model's step with each hook.

    Buckets are those that DDP makes: 1 MiB, then 25 MiB each. They become ready in the course of backward,
    which is taken as two thirds of the step, and are sent one after another. Their cost is interpolated
    between the measured sizes, beside computation and after it.

    Args:
        hooks: The measured hooks.
        model: The model.
        copy_per_byte: Seconds for copying a byte of a gradient.
    """
    sizes = bucket_sizes(model.parameters)
    return Estimate(
        model,
        {
            name: play_step(model.step_seconds, [_of_size(found, size) for size in sizes], copy_per_byte)
            for name, found in hooks.items()
        },
    )


def bucket_sizes(parameters: int) -> list[int]:
    """Return the bytes of the buckets of a model with this number of fp32 parameters, in their order.

    As DDP makes them if no parameter is large: 1 MiB, then 25 MiB each, then the rest.
    """
    first = min(4 * parameters, _FIRST_BUCKET)
    full, rest = divmod(4 * parameters - first, _BUCKET)
    return [first, *[_BUCKET] * full, *([rest] if rest else [])]


def play_step(compute: float, buckets: Sequence[Exchange], copy_per_byte: float = 0.0) -> StepTimes:
    """Return the times of a step whose buckets are sent while backward computes.

    A bucket is ready when the finished share of backward equals the share of the model in it and the buckets
    before it.

    Args:
        compute: Seconds of a step without communication.
        buckets: What averaging each takes, in their order.
        copy_per_byte: Seconds for copying a byte, which DDP does into a bucket during backward, and out of
            it at the end.
    """
    total, so_far = sum(bucket.size for bucket in buckets), 0
    copying = total * copy_per_byte
    backward = compute * _BACKWARD_SHARE + copying
    now = done = 0.0  # since backward began, and how much of it is done
    ends = backward  # when backward ends, if nothing more is sent
    for bucket in buckets:
        so_far += bucket.size
        ready = backward * so_far / total
        if done < ready:  # nothing is sent meanwhile
            now, done = now + ready - done, ready
        overlapped = 0.0
        if (left := backward - done) > 0 and bucket.seconds_beside > 0:
            speed = 1 - bucket.seconds_lost / bucket.seconds_beside
            overlapped = min(bucket.seconds_beside, left / speed if speed > 0 else bucket.seconds_beside)
            now, done = now + overlapped, done + overlapped * speed
            ends = now + backward - done
            overlapped /= bucket.seconds_beside
        now += (1 - overlapped) * bucket.seconds
    now = max(now, ends)
    seconds = compute * (1 - _BACKWARD_SHARE) + now + copying
    return StepTimes(seconds, now - ends, ends - backward, 2 * copying)


def _of_size(exchanges: Sequence[Exchange], size: int) -> Exchange:
    """Return what a bucket of another size would take."""
    alone, beside, lost = (
        _interpolate([(exchange.size, getattr(exchange, times)) for exchange in exchanges], size)
        for times in ("seconds", "seconds_beside", "seconds_lost")
    )
    beside = max(alone, beside)
    return replace(
        exchanges[0], size=size, seconds=alone, seconds_beside=beside, seconds_lost=min(lost, beside)
    )


def _interpolate(points: Sequence[tuple[int, float]], size: int) -> float:
    """Return the value at ``size`` on straight lines through measured points, by rising size.

    Outside of them the nearest line continues, but never below zero: a time that grows with the size is not
    negative for a small one. A single point means proportionality.
    """
    if len(points) == 1:
        points = [(0, 0.0), *points]
    above = next((place for place in range(1, len(points)) if size <= points[place][0]), len(points) - 1)
    (left, low), (right, high) = points[above - 1 : above + 1]
    return max(0.0, low + (high - low) * (size - left) / (right - left))
