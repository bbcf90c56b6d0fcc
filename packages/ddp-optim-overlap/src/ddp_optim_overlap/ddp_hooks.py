"""The communication hooks that a ``DistributedDataParallel`` has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dist_utils.torch_compat import GradBucket, private

__all__ = ["comm_hooks", "register_comm_hook"]


def register_comm_hook(
    ddp: DistributedDataParallel, state: object, hook: Callable[[Any, GradBucket], torch.futures.Future[Any]]
) -> None:
    """Register a communication hook, and change nothing in a model that accepts no more hooks.

    A model accepts none after ``_register_builtin_comm_hook``, which leaves no trace in Python:
    ``ddp.register_comm_hook`` then raises RuntimeError, but keeps the hook in its list. No public name for
    that up to torch 2.15.

    Raises:
        RuntimeError: The model already has a hook.
    """
    hooks = _own_hooks(ddp)
    before = list(hooks)
    try:
        ddp.register_comm_hook(state, hook)
    except BaseException:
        hooks[:] = before
        raise


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the communication hooks that a model has, with their states."""
    return list(_own_hooks(ddp))


def _own_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return a model's own list of them. No public name up to torch 2.15."""
    hooks: list[tuple[Callable[..., Any], object]] = private(ddp, "_comm_hooks", "an overlap beside hooks")
    return hooks
