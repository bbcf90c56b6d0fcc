"""The project's routes for ranks that are not here."""

from __future__ import annotations

from collections.abc import Sequence

from ddp_quant_hooks.link import Transport
from ddp_quant_hooks.options import checked
from ddp_quant_hooks.routes import Route
from many_ranks.programs import Program, all_ranks
from many_ranks.recording import Grid, MakeRoute

__all__ = ["direct", "direct_program", "grid", "grid_program"]

OPTIONS = checked(
    bits=8, block_size=None, gather=None, error_feedback="none", min_bytes=0, exact_1d=False, sample_every=0
)


def direct(rank: int, transport: Transport) -> Route:
    """Return the route of ``QuantizedAllreduceState()``."""
    del rank
    return Route(OPTIONS, transport)


def grid(world: int, per_node: int) -> MakeRoute:
    """Return the routes of ``HierarchicalAllreduceState(mesh=...)``, with nodes of ``per_node`` ranks."""

    def make(rank: int, transport: Transport) -> Route:
        first = rank // per_node * per_node
        return Grid(
            OPTIONS, range(first, first + per_node), range(rank % per_node, world, per_node), transport
        )

    return make


def direct_program(world: int, buckets: Sequence[int], *, on_host: bool = True) -> Program:
    """Return what all ranks do with ``QuantizedAllreduceState()``."""
    return all_ranks(direct, world, buckets, on_host=on_host)


def grid_program(world: int, per_node: int, buckets: Sequence[int], *, on_host: bool = True) -> Program:
    """Return what all ranks do with ``HierarchicalAllreduceState(mesh=...)``."""
    return all_ranks(grid(world, per_node), world, buckets, on_host=on_host)
