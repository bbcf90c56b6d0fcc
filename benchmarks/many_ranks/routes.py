"""The project's routes, for simulated ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from many_ranks.recording import Grid, MakeRoute

from ddp_quant_hooks import QuantizedAllreduceState
from ddp_quant_hooks.link import Transport
from ddp_quant_hooks.plans import Levels
from ddp_quant_hooks.routes import Route

__all__ = ["Direct", "direct", "grid", "planned"]

OPTIONS = QuantizedAllreduceState(min_bytes=0).options

_CHUNK = 5 << 18
"""Values on the wire at a time, before chunks and levels depended on the number of ranks."""


class Direct(Route):
    """The route before levels existed: each rank to every other, in chunks of one length."""

    def levels(self, group: dist.ProcessGroup, count: int) -> Levels:
        """Return one level of all ranks."""
        del count
        return Levels((group.size(),))

    def _chunk_values(self, group: dist.ProcessGroup, count: int, device: torch.device) -> int:
        if self._transport.on_host(group, device):
            return _CHUNK
        return super()._chunk_values(group, count, device)


class _OnHosts(Route):
    def __init__(self, transport: Transport, per_host: int) -> None:
        super().__init__(OPTIONS, transport)
        self._per_host = per_host

    def ranks_per_host(self, group: dist.ProcessGroup) -> int:
        del group
        return self._per_host


class _GridWithoutLevels(Grid):
    def levels(self, group: dist.ProcessGroup, count: int) -> Levels:
        del group, count
        return Levels((len(self._across),))

    def _chunk_values(self, group: dist.ProcessGroup, count: int, device: torch.device) -> int:
        if self._transport.on_host(group, device):
            return _CHUNK
        return super()._chunk_values(group, count, device)


def direct(rank: int, transport: Transport) -> Route:
    """Return the route that ``QuantizedAllreduceState()`` had before levels existed."""
    del rank
    return Direct(OPTIONS, transport)


def planned(per_host: int = 1) -> MakeRoute:
    """Return the routes of ``QuantizedAllreduceState()`` for hosts with ``per_host`` ranks."""

    def make(rank: int, transport: Transport) -> Route:
        del rank
        return _OnHosts(transport, per_host)

    return make


def grid(world: int, per_node: int, *, in_levels: bool = True) -> MakeRoute:
    """Return the routes of ``HierarchicalAllreduceState(mesh=...)``, with nodes of ``per_node`` ranks.

    Args:
        world: Number of ranks.
        per_node: Ranks per node.
        in_levels: As planned now; otherwise each node to every other, as before levels existed.
    """
    kind = Grid if in_levels else _GridWithoutLevels

    def make(rank: int, transport: Transport) -> Route:
        first = rank // per_node * per_node
        across = range(rank % per_node, world, per_node)
        return kind(OPTIONS, range(first, first + per_node), across, transport)

    return make
