"""Conclusions from the measurements: how long a model's steps take, and which hook to take, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddp_quant_hooks.measure.links import BETWEEN, Link
from ddp_quant_hooks.measure.trials import Exchange, Hooks

_BACKWARD_SHARE = 2 / 3
"""Share of a step without communication: backward computes two products where forward computes one."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""DDP's own defaults, in bytes."""
_MOST_PARAMETERS = 10**12
"""More than any rank can hold. A limit is needed because every bucket is simulated."""

_WORTH_IT = 0.05
"""How much faster a less exact hook must be to be taken. A gain within the spread of times does not count."""
_WORTH_ERRORS = 0.2
"""The same for a hook whose averages are wrong by more than ``_LARGE_ERROR``: training may suffer."""
_LARGE_ERROR = 0.05
_LEAVES_MOST = 0.5
"""A hook whose averages are wrong by more leaves most of a step to later ones, as low rank does: what that
costs shows in losses, not in times, so it is measured and not advised."""
_MOSTLY = 0.5


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


@dataclass(frozen=True)
class Advice:
    """The hook to use.

    Attributes:
        hook: The name of the hook.
        situation: ``"slow network"`` if fewer bytes arrive sooner, ``"fast network"`` if they do not, or
            ``"busy processor"``.
        reasons: Sentences, each with the numbers that it is based on.
    """

    hook: str
    situation: str
    reasons: list[str]


def advise(
    links: Sequence[Link], hooks: Hooks, estimate: Estimate | None = None, *, cores_per_rank: float = 1.0
) -> Advice:
    """Return which hook to take, and why.

    Hooks are considered from the most exact to the one with the fewest bytes. The next one is taken if it is
    at least 5 % faster than the one taken so far (20 % if its averages of normal values are wrong by more
    than 5 %): on the largest bucket that was measured, where the quartiles of both must not overlap either;
    for a model, in the estimated step. A hook whose averages are wrong by more than half is never taken: it
    leaves most of a step to later ones.

    The processor is busy if the first hook's exchange keeps it so for half of its time: a rank's share of
    the cores, or an accelerator that computation beside it loses. Otherwise the network is slow if another
    hook is taken, or would be for its exchanges alone, and fast if not.

    Args:
        links: The measured links.
        hooks: The measured hooks, from the most exact on; the first is what the others are compared with.
        estimate: The estimate of a model's steps, to decide by them.
        cores_per_rank: How many cores a rank has for itself, if less than one.

    Returns:
        The hook, the situation, and sentences that say why.
    """
    exchanges = {name: found[-1] for name, found in hooks.items()}
    plain, *_ = exchanges
    sooner = _fastest(exchanges, None)
    taken = sooner if estimate is None else _fastest(exchanges, estimate)
    link = next((one for one in links if one.place == BETWEEN), links[0])
    situation = "fast network" if plain == taken == sooner else "slow network"
    why = f" on a link with {link.gbit:.3g} Gbit/s each way"
    if busy := _about_processor(exchanges[plain], min(1.0, cores_per_rank)):
        situation, why = "busy processor", busy
    took = f"{milliseconds(exchanges[plain].seconds)} ms for {exchanges[plain].size / 2**20:g} MiB"
    reasons = [
        f"{plain} takes {took}{why}. {_about_bytes(exchanges, plain, taken, sooner)}",
        *_about_buckets(hooks, plain, taken),
    ]
    reasons += _about_later(exchanges, taken)
    if (error := exchanges[taken].relative_error) >= 1e-6:
        reasons.append(f"Its averages of normal values were wrong by {error:.2g} of their length.")
    if estimate is not None:
        steps = (
            f"{milliseconds(estimate.steps[name].seconds)} ms with {name}"
            for name in dict.fromkeys([taken, plain])
        )
        reasons.insert(0, f"A step is estimated to take {', '.join(steps)}.")
    return Advice(taken, situation, reasons)


def warn_of_links(hooks: Hooks) -> list[str]:
    """Return a sentence for each hook that moves more over a host's link than the first one, plain DDP."""
    moved = {name: 4 * found[-1].bytes_on_host_link / found[-1].size for name, found in hooks.items()}
    plain = next(iter(moved.values()))
    return [
        f"{name} moves {ours:.2f} bytes a value over a host's link, plain DDP {plain:.2f}"
        for name, ours in moved.items()
        if ours > plain
    ]


def milliseconds(seconds: float) -> str:
    """Return a time in ms with three digits, or with all digits before the point."""
    return f"{1e3 * seconds:.3g}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _fastest(exchanges: dict[str, Exchange], estimate: Estimate | None) -> str:
    taken, *others = exchanges
    for name in others:
        one, other = exchanges[name], exchanges[taken]
        if one.relative_error > _LEAVES_MOST:
            continue
        gain = _WORTH_ERRORS if one.relative_error > _LARGE_ERROR else _WORTH_IT
        if estimate is not None:
            faster = estimate.steps[name].seconds <= (1 - gain) * estimate.steps[taken].seconds
        else:
            faster = one.seconds <= (1 - gain) * other.seconds and one.quartiles[1] <= other.quartiles[0]
        taken = name if faster else taken
    return taken


def _about_processor(exchange: Exchange, cores: float) -> str:
    """Return a clause if an exchange keeps the processor or accelerator busy."""
    if exchange.cpu_seconds >= _MOSTLY * cores * exchange.seconds:
        share = "" if cores == 1 else f", with {cores:.2g} of a core for each rank"
        return f", and {milliseconds(exchange.cpu_seconds)} ms of a rank's processor time{share}"
    if exchange.cpu_seconds == 0 and exchange.seconds_lost >= _MOSTLY * exchange.seconds_beside:
        return f", and computation beside it loses {milliseconds(exchange.seconds_lost)} ms"
    return ""


def _about_bytes(exchanges: dict[str, Exchange], plain: str, taken: str, sooner: str) -> str:
    """Return a sentence about what fewer bytes gain."""
    ours, theirs = exchanges[taken], exchanges[plain]
    if taken != plain:
        faster = theirs.seconds / ours.seconds
        gain = f"{faster:.3g} times as fast" if faster > 1 else "not sooner, but the step is shorter"
        share = ours.bytes_sent / theirs.bytes_sent
        return f"{taken} sends {share:.2f} of the bytes in {milliseconds(ours.seconds)} ms, {gain}."
    gain = "are not clearly faster"
    if sooner != plain:
        gain = "arrive sooner, but the step is not clearly shorter"
    times = (f"{name} {milliseconds(one.seconds)} ms" for name, one in exchanges.items() if name != plain)
    return f"Fewer bytes {gain}: {', '.join(times)}."


def _about_later(exchanges: dict[str, Exchange], taken: str) -> list[str]:
    """Return a sentence for each faster hook that leaves most of a step to later ones."""
    return [
        f"{name} takes {milliseconds(one.seconds)} ms and leaves most of a step to later ones: whether a "
        "training gains by that depends on its losses."
        for name, one in exchanges.items()
        if one.relative_error > _LEAVES_MOST and one.seconds < exchanges[taken].seconds
    ]


def _about_buckets(hooks: Hooks, plain: str, taken: str) -> list[str]:
    """Return a sentence if the hook gains on large buckets only."""
    without = ", ".join(
        f"{one.size / 2**20:g} MiB ({milliseconds(one.seconds)} instead of {milliseconds(other.seconds)} ms)"
        for one, other in zip(hooks[taken][:-1], hooks[plain][:-1], strict=True)
        if one.seconds > (1 - _WORTH_IT) * other.seconds
    )
    if taken == plain or not without:
        return []
    return [
        f"Buckets too small: {taken} gains nothing with {without}. Raise DDP's bucket_cap_mb if most are."
    ]
