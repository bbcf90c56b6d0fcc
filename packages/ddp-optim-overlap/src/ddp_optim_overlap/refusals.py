"""Checks of :func:`overlap_optimizer` before it changes anything."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.fitness import require_plain_step, require_sparse_support
from ddp_optim_overlap.tried import Tried
from dist_utils import resolve_group
from dist_utils.process_groups import group_of_model

__all__ = [
    "averaged_parameters",
    "require_ddp_options",
    "require_group",
    "require_kinds",
    "require_one_first_bucket",
    "require_optimizers",
    "require_options",
    "require_own_parameters",
]

_HOOKS_WHOSE_NONE_IS_WORLD = ("ddp_compress_hooks.", "ddp_quant_hooks.", "torch.distributed.algorithms.")


def require_kinds(
    optimizers: tuple[torch.optim.Optimizer, ...], clip: ClipPolicy | None, unused: str
) -> None:
    """Raise if an argument has the wrong type or value."""
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if not optimizers:
        raise ConfigError("there is no optimizer to step")
    if len({id(optimizer) for optimizer in optimizers}) < len(optimizers):
        raise ConfigError("an optimizer is given twice, and would step twice")
    if clip is not None and not isinstance(clip, ClipPolicy):
        raise TypeError(f"clip must be a ClipPolicy, got {clip!r}")
    if unused not in ("skip", "step"):
        raise ValueError(f"unused must be 'skip' or 'step', got {unused!r}")


def require_ddp_options(ddp: DistributedDataParallel) -> None:
    """Raise if the model averages without passing every gradient to its hook."""
    if ddp.mixed_precision is not None:
        raise ConfigError("DDP(mixed_precision=...) needs the communication hook for itself")
    if getattr(ddp, "skip_all_reduce_unused_params", False):
        raise ConfigError(
            "DDP(skip_all_reduce_unused_params=True) hands over no bucket of which all parameters are "
            "unused: it would be unknown when a pass begins and ends"
        )
    if ddp.static_graph:
        require_one_first_bucket(ddp)


def require_one_first_bucket(ddp: DistributedDataParallel) -> None:
    """Raise if a model of a static graph has several buckets in its first backward pass.

    In that pass DDP numbers all buckets 0, and none is the last one. Each dtype and device, and each sparse
    gradient, has a bucket of its own.
    """
    kinds = {(one.dtype, one.device) for one in ddp.parameters() if one.requires_grad}
    sparse = [module for module in ddp.modules() if getattr(module, "sparse", False)]
    if len(kinds) + len(sparse) > 1:
        raise ConfigError(
            "DDP(static_graph=True) does not tell the buckets of its first pass apart, of which there are "
            "several where parameters have several dtypes or devices, or sparse gradients: leave "
            "static_graph out"
        )


def require_group(ddp: DistributedDataParallel, comm_hook: object, comm_state: object) -> None:
    """Raise if a communication hook's state says that it averages over other ranks than the model."""
    group: object = None
    if isinstance(comm_state, (dist.ProcessGroup, DeviceMesh)):
        group = resolve_group(comm_state)
    elif comm_state is not None:
        group = getattr(comm_state, "process_group", None)
    elif str(getattr(comm_hook, "__module__", "")).startswith(_HOOKS_WHOSE_NONE_IS_WORLD):
        group = resolve_group(None)
    if not isinstance(group, dist.ProcessGroup):
        return  # somebody else's hook, which may determine its ranks by itself
    try:
        group_of_model(ddp, group)
    except ValueError as error:
        raise ConfigError(f"{error}: give comm_hook a comm_state of the model's process group") from error


def require_options(
    *,
    whole: bool,
    clip: ClipPolicy | None,
    scaler: torch.amp.grad_scaler.GradScaler | None,
    unused: str,
    release_gradients: bool,
) -> None:
    """Raise if the options contradict each other; ``whole`` is ``OverlapMode.AFTER_REDUCE``."""
    if not whole and clip is not None and clip.needs_all_gradients:
        raise ConfigError(
            f"{type(clip).__name__} is known only when every bucket is averaged: use "
            "OverlapMode.AFTER_REDUCE, or an approximation (PerBucketNorm, PreviousStepNorm)"
        )
    if not whole and scaler is not None and scaler.is_enabled():
        raise ConfigError(
            "an infinity in the last bucket must undo the whole step, which a GradScaler can only before "
            "any bucket is stepped: use OverlapMode.AFTER_REDUCE, or bf16 without a scaler"
        )
    if unused == "step" and whole:
        raise ConfigError("unused='step' is for OverlapMode.BUCKET: the optimizer's own step skips them")
    if release_gradients and whole:
        raise ConfigError(
            "release_gradients=True is for OverlapMode.BUCKET: AFTER_REDUCE, which GlobalNorm and a "
            "GradScaler need, steps when all gradients are there at once"
        )


def averaged_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the parameters that a model averages, including frozen ones, with their names."""
    return {
        parameter: name
        for name, parameter in ddp.module.named_parameters(remove_duplicate=False)
        if name not in ddp.parameters_to_ignore
    }


def require_own_parameters(
    ddp: DistributedDataParallel, optimizers: tuple[torch.optim.Optimizer, ...]
) -> None:
    """Raise if an optimizer has parameters that this model does not average."""
    averaged = averaged_parameters(ddp)
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for place, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in averaged:
                    raise ConfigError(
                        f"parameter {place} of group {number} of {type(optimizer).__name__}, of shape "
                        f"{tuple(parameter.shape)}, is not one that this DDP model averages: it would never "
                        "be stepped. Give it an optimizer of its own, which the loop steps"
                    )


def require_optimizers(
    optimizers: tuple[torch.optim.Optimizer, ...],
    module: nn.Module,
    *,
    whole: bool,
    clip: ClipPolicy | None,
) -> list[Tried]:
    """Raise if an optimizer cannot step in this mode or with the model's sparse gradients.

    Returns:
        What stepping by buckets must know about each optimizer; empty if ``whole``.
    """
    sparse = _sparse_parameters(module)
    tried = []
    for optimizer in optimizers:
        require_plain_step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in sparse:
                    require_sparse_support(optimizer, parameter, sparse[parameter])
        if not whole:
            tried.append(Tried(optimizer, sparse))
    if sparse and clip is not None:
        raise ConfigError(f"gradients of {', '.join(sparse.values())} are sparse: they cannot be clipped")
    return tried


def _sparse_parameters(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return the parameters with sparse gradients and their names, found as DDP itself finds them."""
    return {
        part.weight: f"{name}.weight".lstrip(".")
        for name, part in module.named_modules()
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.sparse and part.weight.requires_grad
    }
