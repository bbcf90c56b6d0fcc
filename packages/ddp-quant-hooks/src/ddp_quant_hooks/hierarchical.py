"""Full precision inside a node, few bits between nodes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_quant_hooks.grid_route import GridRoute
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.state import QuantizedAllreduceState
from dist_utils import GroupLike, resolve_group

__all__ = ["HierarchicalAllreduceState"]


class HierarchicalAllreduceState(QuantizedAllreduceState):
    """A state whose ranks form a grid of nodes, with a slow link between nodes and a fast one inside.

    Every rank sums one shard of a bucket for its node, in full precision; the ranks that own the same
    shard average it across nodes as :class:`QuantizedAllreduceState` does; then each hands it to its node.
    Between nodes that sends 1 / L of the bytes per rank, with L ranks in a node, and rounds once per
    node instead of once per rank.

    Args:
        process_group: All ranks of the grid; what DDP uses. ``None`` is WORLD.
        intra_group: This rank's node: a process group. With ``inter_group``; not with ``mesh``.
        inter_group: The ranks that have this rank's place on the other nodes.
        mesh: Instead of both: a two-dimensional ``DeviceMesh``, nodes first, as for hybrid sharding.
        **options: As :class:`QuantizedAllreduceState`. Statistics count what is sent inside nodes, too.
            ``levels`` are of nodes: the product of their sizes is the number of nodes.

    Raises:
        TypeError, ValueError: As :class:`QuantizedAllreduceState`; or the groups are not a grid of
            ``process_group``. Errors that only all ranks together can see are raised in the first
            ``backward()``.

    Does not pickle: its groups belong to this job.

    Example:
        >>> mesh = init_device_mesh("cuda", (nodes, 8))  # doctest: +SKIP
        >>> state = HierarchicalAllreduceState(mesh=mesh)  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        intra_group: GroupLike = None,
        inter_group: GroupLike = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        if mesh is not None:
            if intra_group is not None or inter_group is not None:
                raise ValueError("give either mesh, or intra_group and inter_group")
            if mesh.ndim != 2:
                raise ValueError(f"mesh must have two dimensions, nodes and ranks in a node, got {mesh.ndim}")
            inter_group, intra_group = mesh.get_group(0), mesh.get_group(1)
        if intra_group is None or inter_group is None:
            raise ValueError("a hierarchical state needs intra_group and inter_group, or mesh")
        everyone = dist.get_process_group_ranks(resolve_group(process_group))
        inside, across = (
            dist.get_process_group_ranks(resolve_group(group)) for group in (intra_group, inter_group)
        )
        _check_grid(everyone, inside, across)
        self._inside = [everyone.index(rank) for rank in inside]
        self._across = [everyone.index(rank) for rank in across]
        super().__init__(process_group, **options)

    def _make_route(self) -> Route:
        return GridRoute(self.options, self._inside, self._across)

    def _identity(self) -> dict[str, Any]:
        return {**super()._identity(), "intra_group": self._inside, "inter_group": self._across}

    def _terms(self) -> dict[str, object]:
        grid = f"{len(self._across)} nodes of {len(self._inside)} ranks"
        return {**super()._terms(), "hierarchy": grid}

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("a HierarchicalAllreduceState does not pickle: its groups belong to this job")

    def _use_group_of(self, ddp: DistributedDataParallel) -> None:
        if self._group is None:
            self._group = self.process_group  # the grid was made of it
        super()._use_group_of(ddp)


def _check_grid(everyone: list[int], inside: list[int], across: list[int]) -> None:
    for name, ranks in (("intra_group", inside), ("inter_group", across)):
        if not set(ranks) <= set(everyone):
            raise ValueError(f"{name} has ranks {ranks}, not all of them in process_group {everyone}")
    shared = set(inside) & set(across)
    if shared != {dist.get_rank()} or len(inside) * len(across) != len(everyone):
        raise ValueError(
            f"intra_group {inside} and inter_group {across} do not make a grid of the {len(everyone)} ranks "
            f"of process_group: they must share only rank {dist.get_rank()}, and the product "
            "of their sizes must be the number of ranks"
        )
