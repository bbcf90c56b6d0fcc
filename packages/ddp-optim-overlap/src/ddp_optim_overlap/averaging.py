"""The average that DDP computes without a communication hook, to the bit."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dist_utils import resolve_group
from dist_utils.process_groups import GroupLike, future_of_work
from dist_utils.torch_compat import GradBucket

__all__ = ["average_like_ddp", "start_all_reduce"]


def average_like_ddp(
    process_group: GroupLike, bucket: GradBucket
) -> torch.futures.Future[list[torch.Tensor]]:
    """Scale a bucket by 1 / W and sum it over the ranks, as one all-reduce.

    DDP itself multiplies dense gradients by the reciprocal and divides sparse ones. Only the same operations
    give bitwise equal results where W is not a power of two. But DDP divides sparse gradients in place, which
    also divides the gradients of other layers if autograd shares their memory.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        bucket: From DDP, dense or sparse.

    Returns:
        A future of a list with one tensor, exactly as the process group returns it: a callback that unpacked
        it would need the interpreter on one of Gloo's threads. A dense tensor is ``bucket.buffer()`` itself.
    """
    group = resolve_group(process_group)
    buffer = bucket.buffer()
    if buffer.is_sparse:
        # In new memory: an embedding's gradient may share memory with the gradient that flows on to others.
        buffer = buffer / group.size()
    else:
        buffer.mul_(1.0 / group.size())
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return future_of_work(start_all_reduce(values, group), group, buffer.device)


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum of a tensor of real numbers over all ranks, in place; return its work handle.

    ``torch.distributed.all_reduce(async_op=True)`` without its checks and logging, which take as long as a
    small message.
    """
    work: dist.Work = group.allreduce([tensor], dist.AllreduceOptions())
    return work
