"""Average between nodes, in few bits, what FSDP has reduced inside a node."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.fsdp.handle import BeginUse, Handle
from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.states import AveragingState
from ddp_quant_hooks.tensors.all_reduce import submit_all_reduce
from ddp_quant_hooks.tensors.calls import Call, outside_graphs
from dist_utils.process_groups import record_use


def quantize_all_reduce(model: torch.nn.Module, state: AveragingState) -> Handle:
    """Average between nodes, in few bits, the gradients that FSDP has reduced inside a node.

    For models that ``fully_shard`` has sharded over the ranks of a node, or over this rank alone (a mesh of
    one rank, for plain data parallelism). The result is that of native HSDP, which has a mesh of two
    dimensions: the mean over all ranks.

    Every module that ``fully_shard`` was applied to averages its gradients as soon as they are reduced inside
    the node. On CPUs ``backward()`` waits for it there; on GPUs the stream of FSDP's all-reduce waits, and
    with NCCL the host does not.

    With error feedback, one ``backward()`` is one step, or all of them inside ``state.step()``. With several
    micro-batches, nothing is reduced during ``set_requires_gradient_sync(False)``, and the last one averages
    their sum.

    Args:
        model: An FSDP module, or a module that contains some, after ``fully_shard`` has been applied to all
            of them. Neither on a mesh for HSDP nor from ``replicate()``. Parameters outside of them are not
            averaged, as in FSDP; a warning names them.
        state: A :class:`QuantizedAllreduceState`, or a :class:`LowRankState`, for which a parameter's shard
            is a matrix. Its process group joins the ranks with the same shards on all nodes. One for each
            model.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError: An argument is of another type.
        ValueError: There is no FSDP module; one averages between nodes itself or has an all-reduce hook; the
            state is already used for a model, has ``exact_1d`` or ``exact`` names or the residuals of other
            shards, or its group has other ranks of this node. The other ranks of the group get an
            AgreementError. ``backward()`` raises it under ``set_requires_all_reduce(False)``.
        AgreementError: The ranks of the group have different models or different shards, including those of
            tensor parallelism; or those of a mesh have different models, or keep residuals only in part.
        RuntimeError: This torch has no ``FSDPModule.set_all_reduce_hook`` (2.6). ``backward()`` raises it
            when a peer fails: then close the state on every rank; and if ``fully_shard`` was applied to more
            modules afterwards.

    Cost:
        Collective, over the store, in the state's group and in those of the parameters' meshes. Each
        ``backward()`` takes what :func:`ddp_quant_hooks.all_reduce` takes for this rank's shards of each
        module. With error feedback, which is the default for 4 bits, residuals take 4 bytes a value of this
        rank's shards, and with three nodes or more a little more for means; and each pass of autograd ends
        with an all-reduce of one number among the ranks of the node.

    Example:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "shard"))  # doctest: +SKIP
        >>> fully_shard(model, mesh=mesh["shard"])  # doctest: +SKIP
        >>> quantize_all_reduce(model, QuantizedAllreduceState(mesh["node"]))  # doctest: +SKIP
    """
    return _BetweenNodes(model, state)


class _BetweenNodes(Handle):
    _function, _method, _record = "quantize_all_reduce", "set_all_reduce_hook", "_all_reduce_hook"
    _same_shards = True

    def _refuse_module(self, module: ShardedModule, ranks: list[int]) -> None:
        """Raise unless ``ranks`` can average what this module has reduced."""
        if module.replicated:
            raise ValueError(
                f"module {module.name!r} averages between nodes by itself, as on a two-dimensional mesh for "
                "HSDP or by replicate(), and calls hooks too late: call fully_shard(module, "
                "mesh=mesh['shard']) with one dimension, the ranks of a node (instead of replicate(): a mesh "
                "of one rank), and give the state the other: the ranks with the same shard on all nodes"
            )
        if module.collective(self._record) is not None:
            raise ValueError(f"module {module.name!r} has an all-reduce hook")
        shared = sorted(set(ranks) & set(module.shard_ranks) - {dist.get_rank()})
        if shared:
            raise ValueError(
                f"ranks {shared} of the state's process group hold other shards of module {module.name!r}: "
                "the group must join ranks with the same shard on different nodes"
            )

    def _hook_of(self, module: ShardedModule, begin_use: BeginUse) -> Any:
        """Return what averages a module's gradients, in place, as FSDP has reduced them."""
        return partial(_average, module, self._state, begin_use)


@outside_graphs
def _average(
    module: ShardedModule, state: AveragingState, begin_use: BeginUse, reduced: torch.Tensor
) -> None:
    if not module.group.all_reduce_grads:
        raise ValueError(
            f"quantize_all_reduce: set_requires_all_reduce(False) leaves module {module.name!r} with "
            "gradients of one node: accumulate with set_requires_gradient_sync(False) instead"
        )
    record_use(reduced)  # made on FSDP's reduce-scatter stream, which owns its memory
    owner, step = begin_use(reduced, 1)
    # A factor divides the sum over all ranks, as on a mesh for HSDP.
    mean = not module.has_divide_factor
    Call("quantize_all_reduce", state, [reduced], [owner], mean, owner.name, step).run(submit_all_reduce)
