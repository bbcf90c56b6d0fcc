"""Which ranks are on one host, according to the launcher's environment variables."""

from __future__ import annotations

import os

__all__ = ["ranks_per_host"]

_VARIABLES = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK")
"""Environment variables of ``torchrun``; it numbers ranks host by host."""


def ranks_per_host(ranks: int) -> int:
    """Return how many consecutive ranks are on each host; 1 if that is not known, or hosts differ.

    Nothing is communicated: the ranks compare the number together with their options.

    Args:
        ranks: The ranks of the group. Hosts are known only for a group of all ranks of the job.
    """
    try:
        world_size, rank, local_size, local_rank, hosts, host = (int(os.environ[name]) for name in _VARIABLES)
    except (KeyError, ValueError):
        return 1
    alike = world_size == ranks == local_size * hosts and rank == host * local_size + local_rank
    return local_size if alike else 1
