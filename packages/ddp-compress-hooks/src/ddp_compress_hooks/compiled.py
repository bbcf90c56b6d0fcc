"""Average one gradient inside a compiled graph.

Under ``torch.compile`` with DDP's Python reducer a hook gets no bucket but a pair of one parameter's
gradient and the parameter, and must change the gradient in place. Functional collectives keep the graph
whole, and inductor fuses neighboring ones into its own buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ddp_compress_hooks.payload import Clamp, largest_share_for_fp32_sum
from ddp_compress_hooks.state import CompressState
from dist_utils.finite_means import held_mean, held_shares, held_sum, largest_share
from dist_utils.torch_compat import traceable_collective

__all__ = ["average"]


def average(
    state: CompressState, group: dist.ProcessGroup, gradient: torch.Tensor, wire_dtype: torch.dtype | None
) -> torch.Tensor:
    """Average ``gradient`` in place, in ``wire_dtype`` (``None``: its own dtype), and return it."""
    world_size = group.size()
    if world_size == 1 or gradient.numel() == 0:
        return gradient
    if gradient.is_complex():
        average(state, group, torch.view_as_real(gradient), wire_dtype)
        return gradient
    wire_dtype = wire_dtype or gradient.dtype
    share = gradient.to(torch.promote_types(gradient.dtype, wire_dtype)) / world_size
    in_fp32 = state.sums_in_fp32(wire_dtype)
    limit = largest_share_for_fp32_sum if in_fp32 else largest_share
    clamp = state.clamp(limit(wire_dtype, world_size))
    payload = (share if clamp is None else clamp(share)).to(wire_dtype)
    if in_fp32:
        mean = _sum_in_fp32(payload, group, state.clamp(torch.finfo(wire_dtype).max))
    else:
        shares = held_shares(payload, world_size)
        mean = traceable_collective("all_reduce", shares, "sum", group.group_name)
    return gradient.copy_(held_mean(mean, gradient.dtype))


def _sum_in_fp32(payload: torch.Tensor, group: dist.ProcessGroup, clamp: Clamp | None) -> torch.Tensor:
    world_size = group.size()
    padded = pad(payload.flatten(), (0, -payload.numel() % world_size))
    splits = [padded.numel() // world_size] * world_size
    received = traceable_collective("all_to_all_single", padded, splits, splits, group.group_name)
    total = received.view(world_size, -1).sum(0, dtype=torch.float32)
    total = held_sum(total if clamp is None else clamp(total), world_size, payload.dtype)
    shard = total.to(payload.dtype)
    gathered = traceable_collective("all_gather_into_tensor", shard, world_size, group.group_name)
    return gathered[: payload.numel()].view_as(payload)
