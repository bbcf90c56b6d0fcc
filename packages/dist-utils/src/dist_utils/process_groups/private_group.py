"""The private process group of a worker."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from dist_utils.process_groups.groups import timeout_seconds
from dist_utils.process_groups.store import store_connection
from dist_utils.torch_compat import default_group_timeout, group_timeout, private

__all__ = ["await_connections", "new_private_group"]


def new_private_group(group: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a process group of the same ranks, which alone take part.

    ``new_group(use_local_synchronization=True)`` makes up the name from the number of groups that a rank
    has at the moment. Where that differs between ranks the new group hangs, and after a group was
    destroyed its name, and with it the addresses left in the store, are used again. torch 2.15 has fixed the
    first of the two. The public replacement would be that call; no version takes a name yet.

    Args:
        group: The group whose ranks, backends and timeout the new one has.
        name: The same on all ranks, and never used before in this job.

    Cost:
        Collective among the ranks: returns when they are connected. If one of them is gone, Gloo tries
        several times, each for the group's timeout.
    """
    ranks = dist.get_process_group_ranks(group)
    backend = dist.get_backend_config(group)
    kinds = {part.partition(":")[2] or part for part in backend.split(",")}
    if len(kinds) == 1:  # else it has no default backend, and warns about that at its end
        (backend,) = kinds
    timeout = group_timeout(group, torch.device("cpu")) or default_group_timeout()
    purpose = "groups of a worker's own"
    helper = private("torch.distributed.distributed_c10d", "_new_process_group_helper", purpose)
    world = private("torch.distributed.distributed_c10d", "_world", purpose)
    with store_connection(timeout_seconds(group)) as store:
        new, _ = helper(
            len(ranks),
            group.rank(),
            ranks,
            dist.Backend(backend),
            store,
            name,
            timeout=timeout,
            group_desc=name,
        )
    world.pg_group_ranks[new] = {rank: index for index, rank in enumerate(ranks)}
    return cast("dist.ProcessGroup", new)


def await_connections(group: dist.ProcessGroup) -> None:
    """Wait, as the first job, until every rank is connected.

    Gloo returns the group to a rank as soon as that rank is. If its first job failed at once, which ends the
    group, connecting would fail on the others, which would not get to their own job's error.
    """
    if "cpu:gloo" in dist.get_backend_config(group).split(","):
        dist.all_reduce(torch.zeros(1, dtype=torch.int32, device="cpu"), group=group)
