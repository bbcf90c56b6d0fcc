"""Process groups and their collectives: what has no public name, and what has two."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
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
    "new_named_group",
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


_connections: weakref.WeakKeyDictionary[Store, list[Store]] = weakref.WeakKeyDictionary()
"""Unused connections to the same server as a store: a new one takes 0.2 s."""


@contextlib.contextmanager
def _own_connection(store: Store) -> Iterator[Store]:
    """Lend a connection to a store's server to one thread.

    While a thread waits in a store for its peers, requests of other threads wait, too; and the peers may wait
    for those. torch 2.6 has one connection only.
    """
    if not hasattr(store, "clone"):
        yield store
        return
    spare = _connections.setdefault(store, [])
    own: Any = spare.pop() if spare else store.clone()
    yield own
    spare.append(own)  # not if something was raised: an answer may still be on its way


def new_named_group(
    name: str, ranks: list[int], *, backend: str, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a process group of ``ranks``, which alone take part, under a name that the caller chooses.

    ``new_group(use_local_synchronization=True)`` makes up the name from the number of groups that a rank
    has at the moment. Where that differs between ranks the new group hangs, and after a group was
    destroyed its name, and with it the addresses left in the store, are used again. torch 2.15 has fixed the
    first of the two. The public replacement would be that call; no version takes a name yet.

    Args:
        name: The same on all ``ranks``, and never used before in this job.
        ranks: Global ranks in group order, this one among them.
        backend: As for ``init_process_group``.
        timeout: The timeout of its collectives; ``None`` for torch's default.

    Cost:
        Collective among ``ranks``: returns when they are connected.
    """
    rank = ranks.index(dist.get_rank())
    kinds = {part.partition(":")[2] or part for part in backend.split(",")}
    if len(kinds) == 1:  # else it has no default backend, and warns about that at its end
        (backend,) = kinds
    purpose = "groups of a worker's own"
    helper = private("torch.distributed.distributed_c10d", "_new_process_group_helper", purpose)
    world = private("torch.distributed.distributed_c10d", "_world", purpose)
    limit = timeout or default_group_timeout()
    with _own_connection(default_store()) as store:
        group, _ = helper(
            len(ranks), rank, ranks, dist.Backend(backend), store, name, timeout=limit, group_desc=name
        )
    world.pg_group_ranks[group] = {other: index for index, other in enumerate(ranks)}
    return cast("dist.ProcessGroup", group)


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
