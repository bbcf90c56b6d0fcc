"""Features of process groups that have no public names, and groups with a chosen name."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

# torch.distributed has these classes, but type checkers do not find them there.
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as _c10d

__all__ = [
    "GROUPS_END_WITHOUT_GIL",
    "default_group_timeout",
    "default_store",
    "group_timeout",
    "new_named_group",
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
        backend: Any = group._get_backend(device)  # noqa: SLF001
    except RuntimeError:  # no backend of this group serves the device
        return None
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return timeout if isinstance(timeout, timedelta) else None


def default_group_timeout() -> timedelta:
    """Return how long collectives may take by default. No public name up to torch 2.15."""
    return _c10d.default_pg_timeout


def default_store() -> Store:
    """Return the store of the default process group. No public name for it up to torch 2.15."""
    return _c10d._get_default_store()  # noqa: SLF001


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
    helper: Any = _c10d._new_process_group_helper  # noqa: SLF001
    limit = timeout or default_group_timeout()
    with _own_connection(default_store()) as store:
        group, _ = helper(
            len(ranks), rank, ranks, dist.Backend(backend), store, name, timeout=limit, group_desc=name
        )
    _c10d._world.pg_group_ranks[group] = {other: index for index, other in enumerate(ranks)}  # noqa: SLF001
    return cast("dist.ProcessGroup", group)
