"""Reduce and scatter FSDP's gradients in few bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.fsdp.handle import BeginUse, Handle
from ddp_quant_hooks.fsdp.replacement import Substitute
from ddp_quant_hooks.fsdp.sharded_module import ShardedModule
from ddp_quant_hooks.states import AveragingState, QuantizedAllreduceState
from ddp_quant_hooks.tensors.calls import Call, outside_graphs
from ddp_quant_hooks.tensors.shards import run_reduce_scatter


def quantize_reduce_scatter(model: torch.nn.Module, state: QuantizedAllreduceState) -> Handle:
    """Reduce and scatter FSDP's gradients with 16, 8 or 4 bits a value: for sharding across slow links.

    Every module that ``fully_shard`` was applied to gets :func:`ddp_quant_hooks.reduce_scatter_tensor` as its
    reduce-scatter (``FSDPModule.set_custom_reduce_scatter``). Parameters are gathered as they are: weights
    stay exact. One ``backward()`` is one step, with error feedback (``"both"``).

    With ``bits=16`` gradients are sent as bfloat16, and summed in fp32, in the order of ranks. If
    ``param_dtype`` is bfloat16, that is what ``reduce_dtype=torch.float32`` gives, for half of its bytes,
    with one rank a host or on a single host. Among hosts with several ranks each sum of a host is rounded
    once, and so is the sum of micro-batches after ``set_requires_gradient_sync(False)``.

    Args:
        model: As for :func:`quantize_all_reduce`, on a mesh with shards; for HSDP too.
        state: Its process group has the ranks that FSDP shards over. One for each model.

    Returns:
        A handle, to end it with ``remove()``.

    Raises:
        TypeError, ValueError, AgreementError, RuntimeError: As :func:`quantize_all_reduce`; or a module
            has the reduce-scatter of another state. ``backward()`` raises a ValueError if a divide factor
            asks for an operation that is neither sum nor mean.

    Cost:
        Collective, over the store. Each ``backward()`` takes what
        :func:`ddp_quant_hooks.reduce_scatter_tensor` takes for each module's gradients, and waits for it.
        With error feedback, which is the default for 4 bits, a rank keeps residuals of what it sends, not of
        its shards: 4 bytes a value of the whole model, as much as the model in fp32 before it was sharded.
        Among hosts with L ranks each that average in full precision inside, it is 1 / L of that. On a mesh
        for HSDP each pass of autograd then ends with an all-reduce of one number among the replicas.
        ``error_feedback="none"`` keeps none.

    Example:
        >>> fully_shard(model)  # doctest: +SKIP
        >>> quantize_reduce_scatter(model, QuantizedAllreduceState())  # doctest: +SKIP
        >>> quantize_reduce_scatter(model, QuantizedAllreduceState(bits=16))  # or: in 16 # doctest: +SKIP
    """
    return _AcrossShards(model, state)


class _AcrossShards(Handle):
    _function, _method, _record = (
        "quantize_reduce_scatter",
        "set_custom_reduce_scatter",
        "_reduce_scatter_comm",
    )
    _same_shards = False

    def _refuse(self) -> None:
        """Raise unless the state averages shards, and every module is sharded over its ranks."""
        super()._refuse()
        self._state.average.refuse_shards(self._function)

    def _refuse_module(self, module: ShardedModule, ranks: list[int]) -> None:
        """Raise unless this module is sharded over ``ranks``."""
        if isinstance(module.collective(self._record), _ReduceScatter):
            raise ValueError(f"module {module.name!r} has the reduce-scatter of another state")  # noqa: TRY004
        if module.shard_ranks != ranks:
            raise ValueError(
                f"module {module.name!r} is sharded over ranks {module.shard_ranks}, but the state's process "
                f"group has ranks {ranks}"
            )

    def _hook_of(self, module: ShardedModule, begin_use: BeginUse) -> Any:
        """Return what reduces and scatters a module's gradients."""
        return _ReduceScatter(module, self._state, begin_use)


class _ReduceScatter(Substitute):
    """The reduce-scatter of one module, as ``FSDPModule.set_custom_reduce_scatter`` takes it.

    Args:
        module: The module.
        state: The state that reduces.
        begin_use: Begins a use, and gives its key.
    """

    def __init__(self, module: ShardedModule, state: AveragingState, begin_use: BeginUse) -> None:
        self._module, self._state, self._begin_use = module, state, begin_use

    @outside_graphs
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *, op: Any, **_: object
    ) -> None:
        """Reduce the module's gradients in the state's group, and return when that is done."""
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(
                f"quantize_reduce_scatter: module {self._module.name!r}: FSDP asks for neither sum nor mean: "
                "call set_force_sum_reduction_for_comms(True) where a divide factor is set"
            )
        owner, step = self._begin_use(input_tensor, len(self._module.shard_ranks))
        mean = op == dist.ReduceOp.AVG
        call = Call("quantize_reduce_scatter", self._state, [input_tensor], [owner], mean, owner.name, step)
        run_reduce_scatter(call, output_tensor)
