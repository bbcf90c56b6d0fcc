"""The step hooks and marks of optimizers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

# The step hooks of all optimizers have no public names up to torch 2.15.
from torch.optim import optimizer as _optimizer

__all__ = [
    "FUSED_CHECK",
    "mark_stepped",
    "step_post_hooks",
    "step_pre_hooks",
    "step_without_hooks",
    "without_step_hooks",
]


FUSED_CHECK = "_need_device_dtype_check_for_fused"
"""An attribute of fused SGD and Adagrad: whether the next step checks its parameters' devices, which normally
only the first one does."""

_CALLS_HOOKS = torch.optim.Optimizer.profile_hook_step(lambda _: None).__code__

_STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"

_STEP_POST_HOOKS = "_optimizer_step_post_hooks"


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step pre-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    own: Mapping[int, Callable[..., Any]] = getattr(optimizer, _STEP_PRE_HOOKS)
    return {**_optimizer._global_optimizer_pre_hooks, **own}  # noqa: SLF001


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step post-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    own: Mapping[int, Callable[..., Any]] = getattr(optimizer, _STEP_POST_HOOKS)
    return {**_optimizer._global_optimizer_post_hooks, **own}  # noqa: SLF001


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Call an optimizer's ``step`` without any hooks, those of all optimizers included.

    torch wraps the ``step`` of a class in the code that calls them. No public name up to torch 2.15.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is _CALLS_HOOKS:
        step = step.__wrapped__
    step(optimizer, *arguments)


def without_step_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's attributes for another object that steps without the optimizer's step hooks."""
    return {**attributes, _STEP_PRE_HOOKS: OrderedDict(), _STEP_POST_HOOKS: OrderedDict()}


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped without a call of ``step()``.

    They warn otherwise. The attribute that they read has no public name up to torch 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
