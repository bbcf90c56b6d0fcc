"""Process groups and their collectives: what has no public name, and what has two."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from dist_utils.torch_compat.private_names import private

if TYPE_CHECKING:  # torch.distributed has these classes, but type checkers do not find them there
    from torch._C._distributed_c10d import GradBucket, Store
else:
    from torch.distributed import GradBucket, Store

__all__ = [
    "GROUPS_END_WITHOUT_GIL",
    "GradBucket",
    "all_gather_single",
    "default_group_timeout",
    "default_store",
    "group_timeout",
    "reduce_scatter_single",
    "traceable_collective",
]

GROUPS_END_WITHOUT_GIL: bool = hasattr(dist.ProcessGroup, "shutdown")
"""Whether a group may be destroyed as soon as its last collective returned. In torch 2.6 the destructor
joins Gloo's threads while it holds the GIL, and such a thread may be waiting for the GIL to drop the
collective's tensors: a deadlock (seen with 2.6.0 in every long run; never with 2.9.1 or newer)."""


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """Return how long a collective of ``group`` on ``device`` may take, or ``None`` if torch does not say.

    ``new_group`` gives a new group its backend's default timeout, not that of the group it is made
    from, so a private group needs this. No public name up to torch 2.15.
    """
    try:
        backend = private(group, "_get_backend", "the timeout of a process group")(device)
    except RuntimeError:  # no backend of this group serves the device
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def default_group_timeout() -> timedelta:
    """Return how long collectives may take by default. No public name up to torch 2.15."""
    return distributed_c10d.default_pg_timeout


def default_store() -> Store:
    """Return the store of the default process group. No public name for it up to torch 2.15."""
    store = private("torch.distributed.distributed_c10d", "_get_default_store", "agreement between ranks")
    return cast("Store", store())


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


def traceable_collective(name: str, tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Return the result of a collective that ``torch.compile`` sees, in new memory; for graphs only.

    The public functions over these operators have gradients of their own. No public name up to torch 2.15.

    Args:
        name: Its name among the operators ``torch.ops._c10d_functional``.
        tensor: What this rank contributes.
        arguments: What else the operator takes; the group by its ``group_name``.

    Example:
        >>> total = traceable_collective("all_reduce", x, "sum", group.group_name)  # doctest: +SKIP
    """
    operators, purpose = torch.ops._c10d_functional, "collectives under torch.compile"  # noqa: SLF001
    started = private(operators, name, purpose)(tensor, *arguments)
    result: torch.Tensor = private(operators, "wait_tensor", purpose)(started)
    return result
