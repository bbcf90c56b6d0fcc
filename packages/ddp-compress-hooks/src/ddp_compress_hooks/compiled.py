"""Average one gradient inside a compiled graph.

Under ``torch.compile`` with DDP's Python reducer a hook gets no bucket but a pair of one parameter's
gradient and the parameter, and must change the gradient in place. Functional collectives keep the graph
whole, and inductor fuses neighboring ones into its own buckets.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from ddp_compress_hooks.averaging import Clamp, encode, largest_share, largest_share_for_fp32_sum
from ddp_compress_hooks.state import CompressState
from dist_utils import torch_compat

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
    if state.sums_in_fp32(wire_dtype):
        limit = largest_share_for_fp32_sum(wire_dtype, world_size)
        return gradient.copy_(
            _exchange_sums(encode(gradient, world_size, wire_dtype, state.clamp, limit), group, state.clamp)
        )
    share = encode(gradient, world_size, wire_dtype, state.clamp, largest_share(wire_dtype, world_size))
    return gradient.copy_(torch_compat.functional_all_reduce(share, group))


def _exchange_sums(share: torch.Tensor, group: dist.ProcessGroup, clamp: Clamp | None) -> torch.Tensor:
    """Return the sums of all ranks' shares, computed in fp32."""
    world_size = group.size()
    padded = pad(share.flatten(), (0, -share.numel() % world_size))
    received = torch_compat.functional_all_to_all_single(padded, group)
    total = received.view(world_size, -1).sum(0, dtype=torch.float32)
    if clamp is not None:
        total = clamp(total, torch.finfo(share.dtype).max)
    gathered = torch_compat.functional_all_gather(total.to(share.dtype), group)
    return gathered[: share.numel()].view_as(share)
