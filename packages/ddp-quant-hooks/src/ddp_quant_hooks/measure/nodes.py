"""Which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["grid_of", "nodes_of"]


def nodes_of(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, in the order of their first ranks.

    Args:
        keys: What each rank calls its node.
    """
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


def grid_of(nodes: Sequence[Sequence[int]], device_type: str) -> DeviceMesh | None:
    """Return the mesh of a hierarchical state, or ``None`` where the ranks make no grid.

    They do if there are several nodes, of several ranks each, all alike.

    Args:
        nodes: Ranks of each node, all of them together.
        device_type: Of the mesh.

    Cost:
        Collective: makes process groups.
    """
    sizes = {len(node) for node in nodes}
    if len(nodes) == 1 or len(sizes) > 1 or sizes == {1}:
        return None
    return DeviceMesh(device_type, torch.tensor([list(node) for node in nodes]))
