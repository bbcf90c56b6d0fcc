"""Find the models and optimizers inside the wrappers of frameworks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError
from dist_utils.torch_compat import private

__all__ = ["inner_ddp", "inner_optimizer", "replicated_ddp"]


def inner_ddp(model: object) -> DistributedDataParallel:
    """Return the module that averages a model's gradients.

    Args:
        model: That module itself, or one that was given to ``replicate()``.

    Raises:
        TypeError: Its gradients are not averaged by ``DistributedDataParallel``.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    found = replicated_ddp(model) if isinstance(model, torch.nn.Module) else None
    if found is not None:
        return found
    kind = type(model).__name__
    if isinstance(model, torch.nn.Module) and hasattr(model, "set_requires_gradient_sync"):
        kind += ", which FSDP averages: wrap the module in DDP instead"
    raise TypeError(f"ddp must be a DistributedDataParallel, or a module given to replicate(), got {kind}")


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
    ddp: DistributedDataParallel = private(state, "_ddp", "modules given to replicate()")
    return ddp


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps when ``optimizer.step()`` is called.

    Wrappers such as Accelerate's and Lightning's hold it as their ``optimizer`` and share its groups and
    state: they only decide whether to call it. A wrapper with groups or a state of its own does more, and is
    returned unchanged.

    Raises:
        ConfigError: The wrapper unscales gradients with its own ``GradScaler`` in ``step()``.
    """
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer):
        return optimizer
    if inner.param_groups is not optimizer.param_groups or inner.state is not optimizer.state:
        return optimizer
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        raise ConfigError(
            f"{type(optimizer).__name__} calls its own GradScaler in step(), when the parameters are stepped "
            "already: train in bf16 (mixed_precision='bf16'), which needs no scaler"
        )
    return inner_optimizer(inner)
