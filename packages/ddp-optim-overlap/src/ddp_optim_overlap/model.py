"""The model: what DDP averages and how, inside the wrappers of frameworks, and which models are refused."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.errors import ConfigError
from dist_utils import resolve_group
from dist_utils.comm_hooks import none_means_world
from dist_utils.process_groups import group_of_model
from dist_utils.torch_compat import private

_FRAMEWORKS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning")


def inner_ddp(model: object) -> DistributedDataParallel:
    """Return the module that averages a model's gradients: it, or ``replicate()``'s.

    ``torch.distributed._composable.replicate`` makes it in the first ``forward()``; it is made now if that is
    still to come, which communicates like making such a model. It has the module's parameters, in a list, and
    not the module. No public name up to torch 2.15.

    Args:
        model: That module itself, or one that was given to ``replicate()``.

    Raises:
        TypeError: Its gradients are not averaged by ``DistributedDataParallel``.
    """
    if isinstance(model, DistributedDataParallel):
        return model
    composable: Any = sys.modules.get("torch.distributed._composable.replicate")
    if composable is None or not isinstance(model, composable.DDP):
        kind = type(model).__name__
        if hasattr(model, "set_requires_gradient_sync"):
            kind += ", which FSDP averages: wrap the module in DDP instead"
        raise TypeError(
            f"ddp must be a DistributedDataParallel, or a module given to replicate(), got {kind}"
        )
    state = composable.replicate.state(model)
    if not state.has_initialized:
        state.lazy_init()
    ddp: DistributedDataParallel = private(state, "_ddp", "modules given to replicate()")
    return ddp


def inner_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer that steps when ``optimizer.step()`` is called.

    Accelerate's and Lightning's wrappers hold it as their ``optimizer``: they only decide whether to call it.
    Any other wrapper may do more in its step, and is returned unchanged.

    Raises:
        ConfigError: The wrapper unscales gradients with its own ``GradScaler`` in ``step()``.
    """
    inner = getattr(optimizer, "optimizer", None)
    framework = type(optimizer).__module__.partition(".")[0]
    if not isinstance(inner, torch.optim.Optimizer) or framework not in _FRAMEWORKS:
        return optimizer
    scaler = getattr(optimizer, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        raise ConfigError(
            f"{type(optimizer).__name__} calls its own GradScaler in step(), when the parameters are stepped "
            "already: train in bf16 (mixed_precision='bf16'), which needs no scaler"
        )
    return inner_optimizer(inner)


def require_ddp_options(ddp: DistributedDataParallel) -> None:
    """Raise if the model does not pass every gradient to its hook, in time for the end of ``backward()``."""
    if ddp.mixed_precision is not None:
        raise ConfigError("DDP(mixed_precision=...) needs the communication hook for itself")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "DDP(skip_all_reduce_unused_params=True) hands over no bucket of which all parameters are "
            "unused: it would be unknown when a pass begins and ends"
        )
    if getattr(ddp, "require_manual_backward_finalization", False):
        raise ConfigError(
            "DDP's require_manual_backward_finalization lets backward() end before all buckets are averaged"
        )


def require_all_ranks(ddp: DistributedDataParallel) -> None:
    """Raise if the model's own average is not over all ranks; DDP tells no hook over how many it is.

    ``join()`` leaves its option in an attribute of the model. No public name up to torch 2.15.
    """
    if not getattr(ddp, "_divide_by_initial_world_size", True):
        raise ConfigError(
            "join(divide_by_initial_world_size=False) divides by the number of ranks with data, which a hook "
            "does not know: leave it out, or give comm_hook=, for which DDP does not do so either"
        )


def require_one_first_bucket(ddp: DistributedDataParallel) -> None:
    """Raise if a model of a static graph has several buckets in its first backward pass.

    In that pass DDP numbers all buckets 0, and none is the last one. Each dtype and device, and each sparse
    gradient, has a bucket of its own.
    """
    if not ddp.static_graph:
        return
    kinds = {(one.dtype, one.device) for one in averaged_parameters(ddp) if one.requires_grad}
    if len(kinds) + len(sparse_parameters(ddp)) > 1:
        raise ConfigError(
            "DDP(static_graph=True) does not tell the buckets of its first pass apart, of which there are "
            "several where parameters have several dtypes or devices, or sparse gradients: leave "
            "static_graph out"
        )


def may_leave_out(ddp: DistributedDataParallel) -> bool:
    """Return whether parameters may get no gradient in a backward pass; a graph may be made static later."""
    return ddp.find_unused_parameters or ddp.static_graph


def require_group(ddp: DistributedDataParallel, comm_hook: object, comm_state: object) -> None:
    """Raise if a communication hook's state says that it averages over other ranks than the model."""
    group: object = comm_state
    if comm_state is not None and not isinstance(comm_state, (dist.ProcessGroup, DeviceMesh)):
        group = getattr(comm_state, "process_group", comm_state)
    if isinstance(group, DeviceMesh) or (group is None and none_means_world(comm_hook)):
        group = resolve_group(group)
    if not isinstance(group, dist.ProcessGroup):
        return  # somebody else's hook, which may determine its ranks by itself
    try:
        group_of_model(ddp, group)
    except ValueError as error:
        raise ConfigError(f"{error}: give comm_hook a comm_state of the model's process group") from error


def averaged_parameters(ddp: DistributedDataParallel) -> set[torch.Tensor]:
    """Return the parameters that a model averages, including frozen ones, found as DDP itself finds them."""
    return {
        parameter
        for module_name, module in ddp.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{module_name}.{name}" not in ddp.parameters_to_ignore
    }


def sparse_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return averaged parameters with sparse gradients, found as DDP itself finds them, with their names."""
    averaged = averaged_parameters(ddp)
    return {
        part.weight: f"{name}.weight".lstrip(".")
        for name, part in ddp.module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse
        if part.weight in averaged and part.weight.requires_grad
    }
