"""Collectives that autograd sees, with the right gradient for every reduce op."""

from dist_autograd_collectives.connecting import connect
from dist_autograd_collectives.functional import (
    all_gather,
    all_gather_base,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)

_all_gather_base = all_gather_base

__all__ = [
    "all_gather",
    "all_gather_base",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "connect",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

__version__ = "0.1.0"
