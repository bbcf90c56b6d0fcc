"""Checks shared by collectives of shards: a shard on each rank, and a tensor with the shards of all."""

from __future__ import annotations

import torch

from ddp_quant_hooks.collectives.calls import checked_state
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.kernels import VALUE_DTYPES
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.values import flat_real
from dist_utils.comm_hooks import checked_tensors

__all__ = ["checked_shards", "count", "flat_state", "is_quantized"]


def flat_state(name: str, group: QuantizedAllreduceState | None) -> QuantizedAllreduceState:
    """Like :func:`~ddp_quant_hooks.collectives.calls.checked_state`; a hierarchy is a ``TypeError``, too."""
    state = checked_state(name, group)
    if isinstance(state, HierarchicalAllreduceState):
        raise TypeError(f"{name} supports no hierarchical state: give a QuantizedAllreduceState")
    return state


def checked_shards(
    name: str,
    world_size: int,
    *,
    shard: tuple[str, torch.Tensor],
    whole: tuple[str, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both tensors of a call, detached, if they fit each other and can be written in place.

    Args:
        name: The name of the call.
        world_size: The world size of its group.
        shard: The name of an argument, and what was given: one rank's shard.
        whole: The same for the tensor with the shards of all ranks.

    Raises:
        TypeError, ValueError: They do not.
    """
    for argument, tensor in (shard, whole):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise ValueError(f"{name}: {argument} must be contiguous")
    one, everyone = checked_tensors(name, [shard[1], whole[1]])
    if (one.dtype, one.device) != (everyone.dtype, everyone.device):
        raise ValueError(
            f"{name}: {shard[0]} is of {one.dtype} on {one.device}, but {whole[0]} of {everyone.dtype} on "
            f"{everyone.device}"
        )
    if everyone.numel() != world_size * one.numel():
        raise ValueError(
            f"{name}: {whole[0]} has {everyone.numel()} elements, which are not {world_size} (the number of "
            f"ranks) times the {one.numel()} of {shard[0]}"
        )
    return one, everyone


def is_quantized(state: QuantizedAllreduceState, whole: torch.Tensor) -> bool:
    """Return whether the shards of ``whole`` are sent in few bits."""
    return flat_real(whole).dtype in VALUE_DTYPES and whole.nbytes >= state.min_bytes


def count(state: QuantizedAllreduceState, whole: torch.Tensor, sent: int, *, quantized: bool) -> None:
    """Count a call as half an all-reduce of ``whole``."""
    state.counter.add(whole.nbytes // 2, state.process_group.size(), sent, quantized=quantized)
