"""FSDP2: gradients of ``fully_shard`` averaged between nodes, or reduced and scattered, in few bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ddp_quant_hooks.sharded_averages import ShardAverages
from ddp_quant_hooks.sharded_scatter import reduce_scatter_class
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import torch_compat
from dist_utils.process_groups import require_same_terms
from dist_utils.torch_compat import ShardedModule

__all__ = ["Handle", "quantize_all_reduce", "quantize_reduce_scatter"]

_handles: weakref.WeakKeyDictionary[QuantizedAllreduceState, weakref.ref[Handle]] = (
    weakref.WeakKeyDictionary()
)
"""What a state is used for. A handle lives as long as the model."""


class Handle:
    """What :func:`quantize_all_reduce` or :func:`quantize_reduce_scatter` has done to a model.

    Attributes:
        keys: Of the model's FSDP modules, in the model's order: residuals are kept under these names.
    """

    def __init__(self, state: QuantizedAllreduceState, keys: list[str]) -> None:
        self.keys = keys
        self._state = state
        self._undo: list[Callable[[], None]] = []

    def remove(self) -> None:
        """Let FSDP do again what it did before. Residuals stay in the state. Twice is as once.

        Sums that wait for a later micro-batch are forgotten.
        """
        for undo in self._undo:
            undo()
        self._undo.clear()
        if _handles.get(self._state, lambda: None)() is self:
            del _handles[self._state]


def quantize_all_reduce(model: torch.nn.Module, state: QuantizedAllreduceState) -> Handle:
    """Average between nodes, with 8 or 4 bits a value, what FSDP has reduced inside a node.

    For models that ``fully_shard`` has sharded over the ranks of a node, or over this rank alone (a mesh of
    one rank, for plain data parallelism). The result is that of native HSDP, which has a mesh of two
    dimensions: the mean over all ranks.

    Every module that ``fully_shard`` was applied to sends its gradients as soon as they are reduced inside
    the node. On CPU they travel while backward goes on, and are waited for when it ends; no hook should look
    at gradients before. A module waits for its own at once if they are no views of what was reduced: they
    are added to earlier ones, have another dtype than the reduction, are offloaded, or a post-accumulate
    hook takes them. On GPUs the stream of FSDP's all-reduce waits, and with NCCL the host does not.

    One ``backward()`` is one step, with error feedback: not inside of ``state.step()``. Of several
    micro-batches none is averaged during ``set_requires_gradient_sync(False)`` or
    ``set_requires_all_reduce(False)``, and the last one averages their sum. With the latter, what was reduced
    waits beside the gradients, which stay as they are; if a pass fails, or FSDP's ``reset_iter_state()`` is
    called, it is forgotten, and the step begins again.

    Args:
        model: An FSDP module, or a module with such inside. Neither on a mesh for HSDP nor from
            ``replicate()``.
        state: Its process group joins the ranks with the same shards on all nodes. One for each model.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no FSDP module; one averages between nodes itself or has an all-reduce hook;
            the state is used for a model, or its group has other ranks of this node. The other ranks of the
            group get an AgreementError.
        AgreementError: The ranks of the group have other models, or different shards.
        RuntimeError: This torch has no ``FSDPModule.set_all_reduce_hook`` (2.6). ``backward()`` raises it
            when a peer fails: the state must be closed then, on every rank.

    Cost:
        Collective, over the store. Each ``backward()`` takes what :func:`ddp_quant_hooks.all_reduce` takes
        for this rank's shards of each module.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))  # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
        >>> quantize_all_reduce(model, QuantizedAllreduceState(mesh["node"]))  # doctest: +SKIP
    """
    name = "quantize_all_reduce"
    modules = _agreed(name, model, state, "set_all_reduce_hook", _refuse_for_all_reduce)
    averages, handle = ShardAverages(state), Handle(state, list(modules))
    for key, module in modules.items():
        module.set_all_reduce_hook(averages.hook_of(key, module, handle))
        handle._undo.append(partial(module.set_all_reduce_hook, None))  # noqa: SLF001 - its maker
        handle._undo.append(partial(setattr, module, "waiting_sum", None))  # noqa: SLF001
    _handles[state] = weakref.ref(handle)
    return handle


def quantize_reduce_scatter(model: torch.nn.Module, state: QuantizedAllreduceState) -> Handle:
    """Reduce and scatter FSDP's gradients with 8 or 4 bits a value: for sharding across slow links.

    Every module that ``fully_shard`` was applied to gets :func:`ddp_quant_hooks.reduce_scatter_tensor` as its
    reduce-scatter (``FSDPModule.set_custom_reduce_scatter``). Parameters are gathered as they are: weights
    stay exact. One ``backward()`` is one step, with error feedback (``"both"``).

    Args:
        model: As for :func:`quantize_all_reduce`, on a mesh with shards; for HSDP too.
        state: Its process group has the ranks that FSDP shards over. One for each model; no hierarchical
            one.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError, ValueError, AgreementError, RuntimeError: As :func:`quantize_all_reduce`. ``backward()``
            raises a ValueError if a divide factor asks for an operation that is neither sum nor mean.

    Cost:
        Collective, over the store. Each ``backward()`` takes what
        :func:`ddp_quant_hooks.reduce_scatter_tensor` takes for each module's gradients, and waits for it.

    Example:
        >>> fully_shard(model)  # doctest: +SKIP
        >>> quantize_reduce_scatter(model, QuantizedAllreduceState())  # doctest: +SKIP
    """
    name = "quantize_reduce_scatter"
    modules = _agreed(name, model, state, "set_custom_reduce_scatter", _refuse_for_reduce_scatter)
    reduce_scatter, handle = reduce_scatter_class(state), Handle(state, list(modules))
    for key, module in modules.items():
        handle._undo.append(partial(module.set_reduce_scatter, module.reduce_scatter))  # noqa: SLF001
        module.set_reduce_scatter(reduce_scatter(key, handle))
    _handles[state] = weakref.ref(handle)
    return handle


def _agreed(
    name: str,
    model: torch.nn.Module,
    state: QuantizedAllreduceState,
    method: str,
    refuse: Callable[[ShardedModule, list[int]], None],
) -> dict[str, ShardedModule]:
    """Return the model's FSDP modules by key, if nothing speaks against it on any rank."""
    if not isinstance(state, QuantizedAllreduceState):
        raise TypeError(f"{name}: state must be a QuantizedAllreduceState, got {type(state).__name__}")
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{name}: model must be a module, got {type(model).__name__}")
    torch_compat.require_fsdp_method(method)
    problem, modules = None, {}
    try:
        modules = _checked_modules(model, state, refuse)
    except ValueError as error:  # of which the other ranks must hear
        problem = ValueError(f"{name}: {error}")
    # Ranks that scatter hold different shards, ranks that average the same.
    shards = {
        key: module.shard_of if method == "set_all_reduce_hook" else () for key, module in modules.items()
    }
    require_same_terms(state.process_group, name, {"shards of modules": shards}, problem=problem)
    return modules


def _checked_modules(
    model: torch.nn.Module, state: QuantizedAllreduceState, refuse: Callable[[ShardedModule, list[int]], None]
) -> dict[str, ShardedModule]:
    if _handles.get(state, lambda: None)() is not None:
        raise ValueError("the state is used for a model: make one for each, or remove() the other handle")
    modules = {_key_of(module): module for module in torch_compat.sharded_modules(model)}
    if not modules:
        raise ValueError("fully_shard was applied neither to the model nor to a module in it")
    ranks = dist.get_process_group_ranks(state.process_group)
    for module in modules.values():
        refuse(module, ranks)
    return modules


def _key_of(module: ShardedModule) -> str:
    return module.name or "(model)"


def _refuse_for_all_reduce(module: ShardedModule, ranks: list[int]) -> None:
    if module.replicated:
        raise ValueError(
            f"module {_key_of(module)!r} averages between nodes by itself, as on a two-dimensional mesh for "
            "HSDP or by replicate(), and calls hooks too late: call fully_shard(module, mesh=mesh['shard']) "
            "with one dimension, the ranks of a node (in place of replicate(): a mesh of one rank), and give "
            "the state the other: the ranks with the same shard on all nodes"
        )
    if module.all_reduce_hook is not None:
        raise ValueError(f"module {_key_of(module)!r} has an all-reduce hook")
    shared = sorted(set(ranks) & set(module.shard_ranks) - {dist.get_rank()})
    if shared:
        raise ValueError(
            f"ranks {shared} of the state's process group hold other shards of module {_key_of(module)!r}: "
            "the group must join ranks with the same shard on different nodes"
        )


def _refuse_for_reduce_scatter(module: ShardedModule, ranks: list[int]) -> None:
    if module.shard_ranks != ranks:
        raise ValueError(
            f"module {_key_of(module)!r} is sharded over ranks {module.shard_ranks}, but the state's process "
            f"group has ranks {ranks}"
        )
