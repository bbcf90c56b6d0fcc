"""Collectives under the names that this torch has, and collectives that ``torch.compile`` can trace."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist

# The traceable collectives have no public names up to torch 2.15.
from torch.distributed import _functional_collectives as _functional

__all__ = [
    "all_gather_single",
    "functional_all_gather",
    "functional_all_reduce",
    "functional_all_to_all_single",
    "reduce_scatter_single",
    "start_all_reduce",
    "traceable_collectives",
]


traceable_collectives: Any = torch.ops._c10d_functional  # noqa: SLF001
"""The collectives as operators that ``torch.compile`` sees. They work out of place and start at once, wait in
``wait_tensor``, and take groups by name. The public functions over them have gradients of their own."""


def all_gather_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Gather one tensor per rank into one output tensor.

    ``torch.distributed.all_gather_single`` where it exists (2.13), else its older name
    ``all_gather_into_tensor``, which newer versions deprecate.

    Args:
        output: ``W * input.numel()`` elements, in rank order.
        input: This rank's part.
        group: The process group; ``None`` is WORLD.
        async_op: Return a work handle and do not wait.
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("dist.Work | None", gather(output, input, group=group, async_op=async_op))


def reduce_scatter_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Reduce one input tensor over the ranks and leave each rank its part.

    ``torch.distributed.reduce_scatter_single`` where it exists (2.13), else its older name
    ``reduce_scatter_tensor``, which newer versions deprecate.

    Args:
        output: This rank's part, ``input.numel() / W`` elements.
        input: All parts, in rank order.
        op: The reduction.
        group: The process group; ``None`` is WORLD.
        async_op: Return a work handle and do not wait.
    """
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return cast("dist.Work | None", scatter(output, input, op, group=group, async_op=async_op))


def functional_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of ``tensor`` over ``group`` as a new tensor, traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_reduce(tensor, "sum", group)
    return result


def functional_all_to_all_single(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Send the ``r``-th of W equal parts of ``tensor`` to rank ``r``; traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_to_all_single(tensor, None, None, group)
    return result


def functional_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate every rank's ``tensor`` along dimension 0; traceable by ``torch.compile``."""
    result: torch.Tensor = _functional.all_gather_tensor(tensor, 0, group)
    return result


def start_all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start the sum of a tensor of real numbers over all ranks, in place; return its work handle.

    ``torch.distributed.all_reduce(async_op=True)`` without its checks and logging, which take as long as a
    small message.
    """
    work: dist.Work = group.allreduce([tensor], dist.AllreduceOptions())
    return work
