"""The average that DDP computes without a communication hook, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils import GroupLike, resolve_group
from dist_utils.process_groups import future_of_work
from dist_utils.torch_compat import GradBucket


def average_like_ddp(
    process_group: GroupLike, bucket: GradBucket
) -> torch.futures.Future[list[torch.Tensor]]:
    """Scale a bucket by 1 / W and sum it over the ranks, as one all-reduce.

    DDP itself multiplies dense gradients by the reciprocal and divides sparse ones; see also
    :func:`divide_like_ddp`. Only the same operations give bitwise equal results where W is not a power of
    two. But DDP divides sparse gradients in place, which
    also divides the gradients of other layers if autograd shares their memory.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        bucket: From DDP, dense or sparse.

    Returns:
        A future of a list with one tensor, exactly as the process group returns it: a callback that unpacked
        it would need the interpreter on one of Gloo's threads. A dense tensor is ``bucket.buffer()`` itself.
    """
    return _average(process_group, bucket, divides=False)


def divide_like_ddp(process_group: GroupLike, bucket: GradBucket) -> torch.futures.Future[list[torch.Tensor]]:
    """Do the same as DDP with ``batched_grad_copy=True``, which divides dense gradients by W, too."""
    return _average(process_group, bucket, divides=True)


def plain_average(
    ddp: DistributedDataParallel | None,
) -> Callable[[Any, GradBucket], torch.futures.Future[Any]]:
    """Return the hook that averages as a model does without one."""
    return divide_like_ddp if getattr(ddp, "batched_grad_copy", False) else average_like_ddp


def _average(
    process_group: GroupLike, bucket: GradBucket, *, divides: bool
) -> torch.futures.Future[list[torch.Tensor]]:
    # Looking a group up takes as long as a small message.
    group = process_group if isinstance(process_group, dist.ProcessGroup) else resolve_group(process_group)
    buffer = bucket.buffer()
    if buffer.is_sparse:
        # In new memory: an embedding's gradient may share memory with the gradient that flows on to others.
        buffer = buffer / group.size()
    elif divides:
        buffer.div_(group.size())
    else:
        buffer.mul_(1.0 / group.size())
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return future_of_work(start_all_reduce(values, group), group, buffer.device)


def start_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType | None = None
) -> dist.Work:
    """Start an all-reduce of a tensor of real numbers, in place; return its work handle.

    ``torch.distributed.all_reduce(async_op=True)`` without its checks and logging, which take as long as a
    small message.

    Args:
        tensor: The summand of this rank, and then the sum.
        group: The ranks.
        op: Something else than a sum.
    """
    options = dist.AllreduceOptions()
    if op is not None:
        options.reduceOp = dist.ReduceOp(op)
    work: dist.Work = group.allreduce([tensor], options)
    return work
