"""Which hook to take, and why: rules applied to the measurements, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ddp_quant_hooks.measure.estimate import Estimate
from ddp_quant_hooks.measure.links import BETWEEN, Link
from ddp_quant_hooks.measure.quantities import mebibytes, milliseconds
from ddp_quant_hooks.measure.timing import Exchange, HookTimes

__all__ = ["LARGE_ERROR", "WORTH_ERRORS", "WORTH_IT", "Advice", "advise"]

WORTH_IT = 0.05
"""How much faster a less exact hook must be to be taken. A gain within the spread of times does not count."""
WORTH_ERRORS = 0.2
"""The same for a hook whose averages are wrong by more than ``LARGE_ERROR``: training may suffer."""
LARGE_ERROR = 0.05
_MOSTLY = 0.5


@dataclass(frozen=True)
class Advice:
    """The hook to use.

    Attributes:
        hook: The name of the hook.
        situation: ``"slow network"``, ``"fast network"`` or ``"busy processor"``.
        reasons: Sentences, each with the numbers that it is based on.
    """

    hook: str
    situation: str
    reasons: list[str]


def advise(
    links: Sequence[Link],
    hooks: Sequence[HookTimes],
    estimate: Estimate | None = None,
    *,
    cores_per_rank: float = 1.0,
) -> Advice:
    """Return which hook to take, and why.

    Hooks are considered from the most exact to the one with the fewest bytes. The next one is taken if it is
    at least 5 % faster than the one taken so far (20 % if its averages of normal values are wrong by more
    than 5 %): on the largest bucket that was measured with all hooks, where the quartiles of both must not
    overlap either; for a model, in the estimated step.

    The processor is busy if the first hook's exchange keeps it so for half of its time: a rank's share of
    the cores, or an accelerator that computation beside it loses. Otherwise the network is slow if another
    hook is taken, or would be for its exchanges alone, and fast if not.

    Args:
        links: The measured links.
        hooks: The measured hooks, from the most exact on; the first is what the others are compared with.
        estimate: The estimate of a model's steps, to decide by them.
        cores_per_rank: How many cores a rank has for itself, if less than one.

    Raises:
        ValueError: There is no size that was measured with all hooks.
    """
    size = max(_common_sizes(hooks), default=None)
    if size is None:
        raise ValueError("no bucket size was measured with all hooks")
    exchanges = {hook.name: exchange for hook in hooks if (exchange := hook.at(size)) is not None}
    plain, *_ = exchanges
    taken = _fastest(exchanges, estimate)
    link = next((one for one in links if one.place == BETWEEN), links[0])
    busy = _about_processor(exchanges[plain], min(1.0, cores_per_rank))
    situation, why = _situation(exchanges, plain, taken, link, busy)
    reasons = [why, *_about_buckets(hooks, taken, plain, size), *_about_error(exchanges[taken])]
    if estimate is not None:
        reasons.insert(0, _about_steps(estimate, plain, taken))
    return Advice(taken, situation, reasons)


def _common_sizes(hooks: Sequence[HookTimes]) -> set[int]:
    return set.intersection(*({exchange.size for exchange in hook.exchanges} for hook in hooks))


def _fastest(exchanges: dict[str, Exchange], estimate: Estimate | None) -> str:
    taken, *others = exchanges
    for name in others:
        gain = WORTH_ERRORS if exchanges[name].relative_error > LARGE_ERROR else WORTH_IT
        if estimate is not None:
            faster = estimate.steps[name].seconds <= (1 - gain) * estimate.steps[taken].seconds
        else:
            faster = _clearly_faster(exchanges[name], exchanges[taken], gain)
        taken = name if faster else taken
    return taken


def _clearly_faster(one: Exchange, other: Exchange, gain: float) -> bool:
    return one.seconds <= (1 - gain) * other.seconds and one.quartiles[1] <= other.quartiles[0]


def _about_processor(exchange: Exchange, cores: float) -> str:
    """Return a clause if an exchange keeps the processor or accelerator busy."""
    if exchange.cpu_seconds >= _MOSTLY * cores * exchange.seconds:
        share = "" if cores == 1 else f", with {cores:.2g} of a core for each rank"
        return f"and {milliseconds(exchange.cpu_seconds)} ms of a rank's processor time{share}"
    beside = exchange.beside
    if exchange.cpu_seconds == 0 and beside is not None and beside.lost >= _MOSTLY * beside.seconds:
        return f"and computation beside it loses {milliseconds(beside.lost)} ms"
    return ""


def _situation(
    exchanges: dict[str, Exchange], plain: str, taken: str, link: Link, busy: str
) -> tuple[str, str]:
    ours, theirs = exchanges[taken], exchanges[plain]
    sooner = _fastest(exchanges, None)  # regardless of steps
    if taken == plain:
        others = ", ".join(
            f"{name} {milliseconds(own.seconds)} ms" for name, own in exchanges.items() if name != plain
        )
        outcome = f"Fewer bytes are not clearly faster: {others}."
        if sooner != plain:
            outcome = f"Fewer bytes arrive sooner, but the step is not clearly shorter: {others}."
    else:
        share, faster = ours.bytes_sent / theirs.bytes_sent, theirs.seconds / ours.seconds
        gain = f"{faster:.3g} times as fast" if faster > 1 else "not sooner, but the step is shorter"
        outcome = f"{taken} sends {share:.2f} of the bytes in {milliseconds(ours.seconds)} ms, {gain}."
    exchange = f"{plain} takes {milliseconds(theirs.seconds)} ms for {mebibytes(theirs.size)}"
    if busy:
        return "busy processor", f"Busy processor: {exchange}, {busy}. {outcome}"
    situation = "fast network" if plain == taken == sooner else "slow network"
    wire = f"on a link with {link.gbit:.3g} Gbit/s each way"
    return situation, f"{situation.capitalize()}: {exchange} {wire}. {outcome}"


def _about_buckets(hooks: Sequence[HookTimes], taken: str, plain: str, size: int) -> list[str]:
    """Return a sentence if the hook gains on large buckets only."""
    by_name = {hook.name: hook for hook in hooks}
    without = []
    for common in sorted(_common_sizes(hooks) - {size}):
        ours, theirs = by_name[taken].at(common), by_name[plain].at(common)
        if ours is not None and theirs is not None and ours.seconds > (1 - WORTH_IT) * theirs.seconds:
            times = f"{milliseconds(ours.seconds)} ms instead of {milliseconds(theirs.seconds)} ms"
            without.append(f"{mebibytes(common)} ({times})")
    if taken == plain or not without:
        return []
    sizes = ", ".join(without)
    return [f"Buckets too small: {taken} gains nothing with {sizes}. Raise DDP's bucket_cap_mb if most are."]


def _about_error(exchange: Exchange) -> list[str]:
    if exchange.relative_error < 1e-6:
        return []
    return [f"Its averages of normal values were wrong by {exchange.relative_error:.2g} of their length."]


def _about_steps(estimate: Estimate, plain: str, taken: str) -> str:
    ours, theirs = estimate.steps[taken], estimate.steps[plain]
    text = f"A step is estimated to take {milliseconds(ours.seconds)} ms with {taken}"
    return f"{text}." if taken == plain else f"{text}, {milliseconds(theirs.seconds)} ms with {plain}."
