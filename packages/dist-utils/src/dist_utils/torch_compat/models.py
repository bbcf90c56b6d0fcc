"""Models under ``DistributedDataParallel`` and ``torch.compile``: buckets, hooks, names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

# torch.distributed has these classes, but type checkers do not find them there.
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "GradBucket",
    "comm_hooks",
    "hands_over_buckets",
    "parameter_names",
    "register_comm_hook",
    "replicated_ddp",
]


def parameter_names(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a model's parameters by the names that they have without wrappers.

    ``DistributedDataParallel`` puts ``module.`` before all names, ``torch.compile`` puts ``_orig_mod.``
    before those of a compiled module, wherever it stands; the latter has no public name up to torch 2.15.
    """
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inner: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod  # noqa: SLF001
        model = inner
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): parameter
        for name, parameter in model.named_parameters()
    }


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
    before = list(ddp._comm_hooks)  # noqa: SLF001
    try:
        ddp.register_comm_hook(state, hook)
    except BaseException:
        ddp._comm_hooks[:] = before  # noqa: SLF001
        raise


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Callable[..., Any], object]]:
    """Return the communication hooks that a model has, with their states. No public name up to torch 2.15."""
    return list(ddp._comm_hooks)  # noqa: SLF001


def hands_over_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether a model gives its hook buckets, which DDP's Python reducer does not.

    No public name up to torch 2.15.
    """
    return not ddp._use_python_reducer  # noqa: SLF001


def replicated_ddp(module: torch.nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` by which ``replicate()`` averages a module's gradients.

    ``torch.distributed._composable.replicate`` makes it in the first ``forward()``; it is made now if that is
    still to come, which communicates like making such a model. It has the module's parameters, in a list, and
    not the module. No public name up to torch 2.15.

    Returns:
        ``None`` if the module was not given to ``replicate()``.
    """
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None or not isinstance(module, composable.DDP):
        return None
    state = composable.replicate.state(module)
    if not state.has_initialized:
        state.lazy_init()
    ddp: DistributedDataParallel = state._ddp  # noqa: SLF001
    return ddp
