"""Estimate from the measurements how long a training step of a model takes with each hook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_quant_hooks.measure.interpolation import interpolated
from ddp_quant_hooks.measure.step_model import BucketCost, StepTimes, bucket_sizes, play_step
from ddp_quant_hooks.measure.timing import Exchange, HookTimes

__all__ = ["Estimate", "Model", "estimate_steps"]

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
        if not self.parameters > 0:
            raise ValueError(f"parameters must be positive, got {self.parameters}")
        if self.parameters > _MOST_PARAMETERS:
            raise ValueError(f"parameters must be at most {_MOST_PARAMETERS:.0e}, got {self.parameters}")
        if not 0 < self.step_seconds < math.inf:
            raise ValueError(f"step_seconds must be positive and finite, got {self.step_seconds}")


@dataclass(frozen=True)
class Estimate:
    """Whole steps of a model, estimated.

    Attributes:
        model: The model.
        buckets: Their sizes in bytes, as DDP makes them.
        steps: Times of a step, by the name of the hook.
    """

    model: Model
    buckets: list[int]
    steps: dict[str, StepTimes]


def estimate_steps(hooks: Sequence[HookTimes], model: Model, copy_per_byte: float = 0.0) -> Estimate:
    """Return the estimated times of a model's step with each hook.

    Buckets are those that DDP makes: 1 MiB, then 25 MiB each. They become ready in the course of backward,
    which is taken as two thirds of the step, and are sent one after another. Their cost is interpolated
    between the measured sizes, beside computation and after it.

    Args:
        hooks: The measured hooks. Those without any measured size are left out.
        model: The model.
        copy_per_byte: Seconds for copying a byte of a gradient.
    """
    sizes = bucket_sizes(model.parameters)
    return Estimate(
        model,
        sizes,
        {
            hook.name: play_step(
                model.step_seconds, [_cost(hook.exchanges, size) for size in sizes], copy_per_byte
            )
            for hook in hooks
            if hook.exchanges
        },
    )


def _cost(exchanges: Sequence[Exchange], size: int) -> BucketCost:
    alone = interpolated([(exchange.size, exchange.seconds) for exchange in exchanges], size)
    measured = [(exchange, exchange.beside) for exchange in exchanges if exchange.beside is not None]
    if not measured:  # for lack of budget: assume that computation does not disturb
        return BucketCost(size, alone, alone, 0.0)
    longer = interpolated([(one.size, beside.seconds) for one, beside in measured], size)
    lost = interpolated([(one.size, beside.lost) for one, beside in measured], size)
    return BucketCost(size, alone, max(longer, alone), min(lost, max(longer, alone)))
