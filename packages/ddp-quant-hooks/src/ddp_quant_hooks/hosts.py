"""Which ranks are on one host, as far as the launcher's environment variables say."""

from __future__ import annotations

import os

__all__ = ["ranks_per_host"]

_TOLD = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE", "GROUP_RANK")
"""Environment variables of ``torchrun``; it numbers ranks host by host."""


def ranks_per_host(ranks: int) -> int:
    """Return how many consecutive ranks are on each host; 1 if that is not known, or they are not alike.

    Nothing is communicated: the ranks compare it with their options.

    Args:
        ranks: The ranks of the group. Only of all ranks of the job anything is known.
    """
    try:
        world_size, rank, local_size, local_rank, hosts, host = (int(os.environ[name]) for name in _TOLD)
    except (KeyError, ValueError):
        return 1
    alike = world_size == ranks == local_size * hosts and rank == host * local_size + local_rank
    return local_size if alike else 1
