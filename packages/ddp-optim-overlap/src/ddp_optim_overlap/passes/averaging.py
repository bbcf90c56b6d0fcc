"""The average that DDP computes without a communication hook, to the bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.comm_hooks import completed_future, failed_future, sparse_mean
from dist_utils.process_groups import future_of_work
from dist_utils.torch_compat import GradBucket

_POLL_SECONDS = 0.0002
"""A bucket takes some milliseconds, and so does a peer that is late."""


def average_like_ddp(
    group: dist.ProcessGroup, bucket: GradBucket, *, divides: bool = False
) -> torch.futures.Future[Any]:
    """Scale a bucket by 1 / W and sum it over the ranks: a dense one as one all-reduce.

    DDP itself multiplies dense gradients by the reciprocal and divides sparse ones. Only the same operations
    give bitwise equal results where W is not a power of two. But DDP divides sparse gradients in place, which
    also divides the gradients of other layers if autograd shares their memory.

    Args:
        group: The ranks.
        bucket: From DDP, dense or sparse.
        divides: Whether dense gradients are divided, too.

    Returns:
        For a dense bucket, a future of a list with ``bucket.buffer()`` itself, exactly as the process group
        returns it: a callback that unpacked it would need the interpreter on one of Gloo's threads. For a
        sparse one, a complete future of a new tensor.
    """
    buffer = bucket.buffer()
    if buffer.is_sparse:
        try:
            return completed_future(sparse_mean(group, buffer))
        except Exception as error:  # noqa: BLE001 - of the average, and not of this call
            return failed_future(error, buffer)
    if divides:
        buffer.div_(group.size())
    else:
        buffer.mul_(1.0 / group.size())
    values = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return future_of_work(start_all_reduce(values, group), group, buffer.device)


def plain_average(ddp: DistributedDataParallel) -> Callable[[Any, GradBucket], torch.futures.Future[Any]]:
    """Return the hook that averages as a model does without one; with ``batched_grad_copy`` it divides."""
    divides = getattr(ddp, "batched_grad_copy", False)
    return partial(average_like_ddp, divides=True) if divides else average_like_ddp


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


def completes_within(is_complete: Callable[[], bool], seconds: float) -> bool:
    """Wait for communication for a while; return whether it is complete, with or without an error.

    A callback that ended the wait would need the interpreter on one of Gloo's threads.
    """
    deadline = time.monotonic() + seconds
    while not is_complete():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True
