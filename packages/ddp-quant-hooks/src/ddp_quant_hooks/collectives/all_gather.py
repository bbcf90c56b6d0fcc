"""Gather the shards of all ranks on all ranks."""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives.calls import Future, never_traced, run
from ddp_quant_hooks.collectives.shards import checked_shards, count, flat_state, is_quantized
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.tensor_steps import TensorStep
from ddp_quant_hooks.values import flat_real
from dist_utils import torch_compat

__all__ = ["all_gather_into_tensor"]


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = ...,
    async_op: Literal[False] = ...,
) -> None: ...


@overload
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = ...,
    *,
    async_op: Literal[True],
) -> Future: ...


@never_traced
def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: QuantizedAllreduceState | None = None,
    async_op: bool = False,
) -> Future | None:
    """Gather every rank's tensor on all ranks, in the state's format for averages (``gather``).

    The second half of :func:`all_reduce`. Every rank, including the sender, gets each tensor as it was sent,
    so that all have identical bits. There is no error feedback.

    Args:
        output_tensor: The output for all tensors, one after another: contiguous, ``W * input_tensor.numel()``
            elements, of its dtype.
        input_tensor: This rank's values; contiguous.
        group: A state, with its group and options; not a hierarchical one. ``None`` stands for WORLD and 8
            bits.
        async_op: Return a future of ``output_tensor`` at once.

    Returns:
        ``None``, or with ``async_op`` a future of ``output_tensor``, not to be touched before it is complete.
        Identical bits on all ranks. A block with a NaN or an infinity is NaN.

    Raises:
        TypeError: A tensor is sparse or not of a floating-point dtype, or an argument of another type.
        ValueError: The tensors do not fit each other, share memory or are part of a graph, or this rank is
            not in the group. Like ``TypeError`` before any communication.
        AgreementError: The ranks call with different tensors or options; with ``async_op`` the future raises
            it.
        RuntimeError: A peer failed, and the state must be closed on every rank; or the call is made in a
            callback of another call's future.

    Cost:
        W - 1 bytes a value of ``input_tensor`` with 8 bits, and 3 % for scales. An output below
        ``min_bytes``, or of fp64, is gathered without compression.

    Source:
        ``torch.distributed.all_gather_into_tensor``.

    Example:
        >>> all_gather_into_tensor(everyone, mine, state)  # doctest: +SKIP
    """
    name = "all_gather_into_tensor"
    state = flat_state(name, group)
    world_size = state.process_group.size()
    source, target = checked_shards(
        name, world_size, shard=("input_tensor", input_tensor), whole=("output_tensor", output_tensor)
    )
    if world_size == 1:
        target.copy_(source.view(target.shape))

    def start() -> list[Future]:
        return [_start(state, source, target)]

    return run(name, state, TensorStep(), [source], {}, start, output_tensor if async_op else None)


def _start(state: QuantizedAllreduceState, source: torch.Tensor, target: torch.Tensor) -> Future:
    quantized = is_quantized(state, target)

    def job(group: dist.ProcessGroup) -> torch.Tensor:
        mine, everyone = flat_real(source), flat_real(target)
        if quantized:
            sent = state.route.all_gather(group, mine, everyone)
        else:
            torch_compat.all_gather_single(everyone, mine, group)
            torch.autograd.graph.increment_version(everyone)  # the backend does not tell autograd
            sent = (group.size() - 1) * mine.nbytes
        count(state, target, sent, quantized=quantized)
        return target

    return state.worker.submit(
        job, device=source.device, name="ddp_quant_hooks.all_gather_into_tensor:exchange"
    )
