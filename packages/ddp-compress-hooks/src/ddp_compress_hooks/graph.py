"""Average one gradient inside a compiled graph.

Under ``torch.compile`` with DDP's Python reducer a hook gets no bucket but a pair of one parameter's
gradient and the parameter, and must change the gradient in place. Functional collectives keep the graph
whole, and inductor fuses neighboring ones into its own buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ddp_compress_hooks.averaging import encode
from ddp_compress_hooks.state import Clamp, CompressState
from dist_utils.comm_hooks import clamp_mean
from dist_utils.torch_compat import start_traceable_collective


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
    share = encode(state, gradient, wire_dtype, divisor=world_size)
    if state.sums_in_fp32(wire_dtype):
        mean = _exchange_sums(share, group, state.clamp)
    else:
        mean = start_traceable_collective("all_reduce", share, "sum", group.group_name)()
    return gradient.copy_(clamp_mean(mean, gradient.dtype))


def _exchange_sums(share: torch.Tensor, group: dist.ProcessGroup, clamp: Clamp | None) -> torch.Tensor:
    """Return the sums of all ranks' shares, computed in fp32."""
    world_size = group.size()
    padded = pad(share.flatten(), (0, -share.numel() % world_size))
    splits = [padded.numel() // world_size] * world_size
    received = start_traceable_collective("all_to_all_single", padded, splits, splits, group.group_name)()
    total = received.view(world_size, -1).sum(0, dtype=torch.float32)
    if clamp is not None:
        total = clamp(total, torch.finfo(share.dtype).max)
    shard = total.to(share.dtype)
    gathered = start_traceable_collective("all_gather_into_tensor", shard, world_size, group.group_name)()
    return gathered[: share.numel()].view_as(share)
