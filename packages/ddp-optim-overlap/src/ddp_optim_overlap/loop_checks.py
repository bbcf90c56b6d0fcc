"""Checks for what a training loop must not do around overlapped steps, because results would differ."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

import torch

from ddp_optim_overlap.device_samples import Comparison
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.optimizer_hooks import step_post_hooks
from ddp_optim_overlap.partial_steps import PartialSteps, parameters_of
from ddp_optim_overlap.replaced_step import has_pre_hooks
from ddp_optim_overlap.step_inputs import StepInputs

__all__ = [
    "ForeignParameters",
    "UnreadComparisons",
    "require_calls",
    "require_gradients",
    "require_no_post_hooks",
    "require_no_pre_hooks",
    "require_one_overlap",
    "require_unchanged",
]


def require_no_pre_hooks(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if a step pre-hook of an optimizer that is stepped by buckets would run too late.

    Raises:
        ConfigError: There is one.
    """
    for optimizer in optimizers:
        if has_pre_hooks(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} has a step pre-hook, which may change gradients and would "
                "run after they were used: use OverlapMode.AFTER_REDUCE"
            )


def require_no_post_hooks(left_out: Iterable[torch.optim.Optimizer]) -> None:
    """Raise if an optimizer that was stepped by buckets has a step post-hook that has not run.

    Args:
        left_out: The optimizers whose ``step()`` was not called for the last pass.

    Raises:
        ConfigError: One has such a hook.
    """
    for optimizer in left_out:
        if step_post_hooks(optimizer):
            raise ConfigError(
                f"{type(optimizer).__name__} has a step post-hook, which runs in step(), and step() was "
                "not called for the last backward pass: call it after each one, or take the hook away"
            )


def require_calls(left_out: Collection[torch.optim.Optimizer]) -> None:
    """Raise if ``step()`` was not called for every optimizer that a pass has stepped: that undoes nothing.

    Args:
        left_out: The optimizers whose ``step()`` was called before, but not for the last pass.

    Raises:
        ConfigError: There is such an optimizer.
    """
    if left_out:
        raise ConfigError(
            f"the last backward pass has stepped {_names(left_out)}, and step() of it was not called, as it "
            "was before: without step() in the loop a pass steps all the same. Call handle.pause() around a "
            "backward pass that is to step nothing, or not everything"
        )


def require_one_overlap(optimizers: Iterable[torch.optim.Optimizer], *, superseded: bool) -> None:
    """Raise if ``step()`` now asks another overlap, which does not know the passes of this one.

    Raises:
        ConfigError: Another overlap has taken over.
    """
    if superseded:
        raise ConfigError(
            f"{_names(optimizers)} is overlapped by something else since: its step() would step again what "
            "this backward pass steps. An optimizer takes part in one overlap: remove() this one first, or "
            "give each model an optimizer of its own"
        )


def require_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise if an ordinary step finds no gradients because they were freed.

    Raises:
        ConfigError: No parameter has one.
    """
    if all(parameter.grad is None for parameter in parameters_of(optimizer)):
        raise ConfigError(
            "step() was called once more, and with release_gradients=True the gradients are gone: leave "
            "that out to step with them again"
        )


def require_unchanged(
    optimizer: torch.optim.Optimizer, inputs: StepInputs, contents: GradientContents | None
) -> None:
    """Raise if an input of a step was changed after the step had read it.

    Args:
        optimizer: The optimizer that was stepped.
        inputs: The inputs that the step has read.
        contents: See :meth:`StepInputs.changed`.

    Raises:
        ConfigError: Something was changed.
    """
    changed = inputs.changed(optimizer, contents)
    if changed is None and getattr(optimizer, "found_inf", None) is not None:
        changed = "a GradScaler called step()"
    if changed is not None:
        _refuse_change(changed, "backward() and step()")


def _refuse_change(changed: str, where: str) -> None:
    raise ConfigError(
        f"{changed} between {where}, after the step had been done: do it before "
        "backward() or after step(), or give clip= or scaler= to overlap_optimizer instead. A norm "
        "that is only looked at: torch.nn.utils.get_total_norm, or the report of handle.wait()"
    )


class UnreadComparisons:
    """Comparisons of step inputs on accelerators, whose answers are read late to avoid waiting.

    The first call of ``step()`` waits for the answer, because a loop that clips gradients does so from its
    first step on. Later calls let the device continue, and the next backward pass reads the answer.
    """

    def __init__(self) -> None:
        self._unread: list[Comparison] = []
        self._asked: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def add(self, optimizer: torch.optim.Optimizer, inputs: StepInputs) -> None:
        """Start a comparison. On the first call for an optimizer, wait for it and raise if anything changed.

        Raises:
            ConfigError: Something was changed.
            ConfigError: Something was.
        """
        comparison = inputs.compare_on_device()
        if comparison is None:
            return
        if optimizer in self._asked:
            self._unread.append(comparison)
            return
        self._asked.add(optimizer)
        if comparison.found():
            _refuse_change(_SAMPLED, "backward() and step()")

    def require_none(self) -> None:
        """Raise if something was changed around an earlier step. Waits for the comparison if necessary.

        Raises:
            ConfigError: Something was changed.
        """
        unread, self._unread = self._unread, []
        if any(comparison.found() for comparison in unread):
            _refuse_change(_SAMPLED, "the last backward() and its step()")


_SAMPLED = "gradients or parameters were changed (clipped, unscaled, ...)"


class ForeignParameters:
    """Looks for optimizer parameters that DDP does not average, whenever either set has changed.

    Args:
        steps: The steps of the optimizers.
    """

    def __init__(self, steps: PartialSteps) -> None:
        self._steps = steps
        self._looked_at = (0, 0)
        self._not_averaged: Sequence[torch.Tensor] = ()

    def require_none(self, averaged: Collection[torch.Tensor]) -> None:
        """Raise if there is a parameter that would have to be stepped but is not averaged.

        Args:
            averaged: The parameters that have been in a bucket.

        Raises:
            ConfigError: There is such a parameter.
        """
        if not averaged:  # not known yet in the first pass
            return
        looked_at = self._steps.renewals, len(averaged)
        if looked_at != self._looked_at:
            self._looked_at = looked_at
            self._not_averaged = [one for one in self._steps.parameters if one not in averaged]
        for parameter in self._not_averaged:
            if parameter.requires_grad or parameter.grad is not None:
                raise ConfigError(
                    f"an optimizer has a parameter, of shape {tuple(parameter.shape)}, that this DDP model "
                    "does not average, as it is not the model's or was frozen when DDP was made: it would "
                    "never be stepped. Give it an optimizer of its own, or make a new DDP model"
                )


def _names(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers)
