"""Which ranks share a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dist_utils.torch_compat import GROUPS_END_WITHOUT_GIL

__all__ = ["grid_of", "nodes_of"]


def nodes_of(keys: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each node, in the order of their first ranks.

    Args:
        keys: Each rank's name for its node.
    """
    nodes: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        nodes.setdefault(key, []).append(rank)
    return list(nodes.values())


@contextmanager
def grid_of(nodes: Sequence[Sequence[int]], device_type: str) -> Iterator[DeviceMesh | None]:
    """Yield the mesh of a hierarchical state, or ``None`` if the ranks are not a grid; then end its groups.

    They are one if there are several nodes with several ranks each, all of the same size.

    Args:
        nodes: Ranks of each node, all of them together.
        device_type: The device type of the mesh.

    Cost:
        Collective: makes process groups.
    """
    sizes = {len(node) for node in nodes}
    if len(nodes) == 1 or len(sizes) > 1 or sizes == {1}:
        yield None
        return
    mesh = DeviceMesh(device_type, torch.tensor([list(node) for node in nodes], device="cpu"))
    try:
        yield mesh
    finally:
        if GROUPS_END_WITHOUT_GIL:  # otherwise they end with all others
            for group in mesh.get_all_groups():
                dist.destroy_process_group(group)
