"""What torch keeps about the steps of an optimizer: hooks around them, and marks."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from dist_utils.torch_compat import private

_PURPOSE = "steps without an optimizer's step hooks"

_STEP_PRE_HOOKS = "_optimizer_step_pre_hooks"

_STEP_POST_HOOKS = "_optimizer_step_post_hooks"

NOT_OF_THE_STEP = frozenset(
    {"param_groups", "step", _STEP_PRE_HOOKS, _STEP_POST_HOOKS, "_need_device_dtype_check_for_fused"}
)
"""Attributes in which a stand-in may differ from its optimizer. The last one says whether the next step of
fused SGD and Adagrad checks its parameters' devices, which normally only the first one does."""


def step_pre_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step pre-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    of_all = private("torch.optim.optimizer", "_global_optimizer_pre_hooks", _PURPOSE)
    return {**of_all, **private(optimizer, _STEP_PRE_HOOKS, _PURPOSE)}


def step_post_hooks(optimizer: torch.optim.Optimizer) -> Mapping[int, Callable[..., Any]]:
    """Return the step post-hooks of an optimizer and of all optimizers. No public name up to torch 2.15."""
    of_all = private("torch.optim.optimizer", "_global_optimizer_post_hooks", _PURPOSE)
    return {**of_all, **private(optimizer, _STEP_POST_HOOKS, _PURPOSE)}


def step_without_hooks(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
    """Call an optimizer's ``step`` without any hooks, those of all optimizers included.

    torch wraps the ``step`` of a class in the code that calls them. No public name up to torch 2.15.
    """
    step: Any = type(optimizer).step
    if getattr(step, "__code__", None) is _calls_hooks():
        step = step.__wrapped__
    step(optimizer, *arguments)


@functools.cache
def _calls_hooks() -> CodeType:
    """Return the code that calls the hooks around any ``step``."""

    def step(_: torch.optim.Optimizer) -> None: ...

    return torch.optim.Optimizer.profile_hook_step(step).__code__


def without_step_hooks(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's attributes for another object that steps without the optimizer's step hooks."""
    return {**attributes, _STEP_PRE_HOOKS: OrderedDict(), _STEP_POST_HOOKS: OrderedDict()}


def note_writes(parameters: Sequence[torch.Tensor]) -> None:
    """Tell autograd, before a step, which parameters it writes.

    A node that still has to read one of them then raises. Fused steps do not tell it.
    """
    torch.autograd.graph.increment_version([one for one in parameters if one.grad is not None])


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that the optimizer has stepped without a call of ``step()``.

    They warn otherwise. The attribute that they read has no public name up to torch 2.15.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # noqa: SLF001
