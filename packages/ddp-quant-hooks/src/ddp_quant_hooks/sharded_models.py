"""Check on all ranks, before anything is changed, that a state can be used for a model under FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from ddp_quant_hooks.sharded_modules import ShardedModule, require_fsdp_method, sharded_modules
from ddp_quant_hooks.sharded_scatter import is_quantized
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils.process_groups import require_same_terms

__all__ = ["agreed_modules", "key_of", "refuse_for_all_reduce", "refuse_for_reduce_scatter"]


def agreed_modules(
    name: str,
    model: torch.nn.Module,
    state: QuantizedAllreduceState,
    method: str,
    refuse: Callable[[ShardedModule, list[int]], None],
    *,
    in_use: Callable[[QuantizedAllreduceState], bool],
) -> dict[str, ShardedModule]:
    """Return the model's FSDP modules by key, if no rank has a reason to refuse.

    Args:
        name: The name of the function, for messages.
        model: The user's model.
        state: The user's state.
        method: The method that FSDP must have.
        refuse: Raises a ValueError for a module, given the ranks of the state's group.
        in_use: Whether a model uses the state.
    """
    if not isinstance(state, QuantizedAllreduceState):
        raise TypeError(f"{name}: state must be a QuantizedAllreduceState, got {type(state).__name__}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: model must be a module, got {type(model).__name__}")
    require_fsdp_method(method)
    problem, modules = None, {}
    try:
        modules = _checked_modules(model, state, refuse, in_use)
    except ValueError as error:  # the other ranks must hear of it
        problem = ValueError(f"{name}: {error}")
    # Ranks that scatter hold different shards, ranks that average the same.
    averages = method == "set_all_reduce_hook"
    terms = {
        f"module {key!r}": (module.shapes, module.places if averages else [])
        for key, module in modules.items()
    }
    require_same_terms(state.process_group, name, terms, problem=problem)
    state.places = _places(modules)
    _warn_of_others(name, model, modules)
    return modules


def _warn_of_others(name: str, model: torch.nn.Module, modules: dict[str, ShardedModule]) -> None:
    """Name the parameters that nobody averages, on any rank: ranks would drift apart."""
    sharded: set[int] = set().union(*(module.parameter_ids for module in modules.values()))
    others = [key for key, one in model.named_parameters() if one.requires_grad and id(one) not in sharded]
    if others:
        warnings.warn(
            f"{name} does not average gradients of {others}: fully_shard was applied to no module that has "
            "them, or was told to ignore them",
            stacklevel=4,
        )


def _checked_modules(
    model: torch.nn.Module,
    state: QuantizedAllreduceState,
    refuse: Callable[[ShardedModule, list[int]], None],
    in_use: Callable[[QuantizedAllreduceState], bool],
) -> dict[str, ShardedModule]:
    if in_use(state):
        raise ValueError("the state is used for a model: make one for each, or remove() the other handle")
    if state.feedback.of_buckets:
        raise ValueError("the state has residuals of a DistributedDataParallel model: make one for each")
    if state.feedback.step_is_open:
        raise ValueError("inside step(): under FSDP a backward() is a step")
    if state.exact_1d:
        raise ValueError(
            "exact_1d does not work: FSDP hands over all parameters of a module as one flat tensor"
        )
    modules = {key_of(module): module for module in sharded_modules(model)}
    if not modules:
        raise ValueError("fully_shard was applied neither to the model nor to a module in it")
    ranks = dist.get_process_group_ranks(state.process_group)
    for module in modules.values():
        refuse(module, ranks)
    if state.stand_ins.named and state.places not in (None, places := _places(modules)):
        raise ValueError(f"the state has residuals of shards {state.places}, but this rank has {places}")
    return modules


def _places(modules: dict[str, ShardedModule]) -> list[str]:
    return sorted({place for module in modules.values() for place in module.places})


def key_of(module: ShardedModule) -> str:
    """Return the name under which a module's residuals are kept."""
    return module.name or "(model)"


def refuse_for_all_reduce(module: ShardedModule, ranks: list[int]) -> None:
    """Raise unless ``ranks`` can average what this module has reduced."""
    if module.replicated:
        raise ValueError(
            f"module {key_of(module)!r} averages between nodes by itself, as on a two-dimensional mesh for "
            "HSDP or by replicate(), and calls hooks too late: call fully_shard(module, mesh=mesh['shard']) "
            "with one dimension, the ranks of a node (instead of replicate(): a mesh of one rank), and give "
            "the state the other: the ranks with the same shard on all nodes"
        )
    if module.all_reduce_hook is not None:
        raise ValueError(f"module {key_of(module)!r} has an all-reduce hook")
    shared = sorted(set(ranks) & set(module.shard_ranks) - {dist.get_rank()})
    if shared:
        raise ValueError(
            f"ranks {shared} of the state's process group hold other shards of module {key_of(module)!r}: "
            "the group must join ranks with the same shard on different nodes"
        )


def refuse_for_reduce_scatter(module: ShardedModule, ranks: list[int]) -> None:
    """Raise unless ``ranks`` are those that this module is sharded over."""
    if is_quantized(module.reduce_scatter):
        raise ValueError(f"module {key_of(module)!r} has the reduce-scatter of another state")
    if module.shard_ranks != ranks:
        raise ValueError(
            f"module {key_of(module)!r} is sharded over ranks {module.shard_ranks}, but the state's process "
            f"group has ranks {ranks}"
        )
