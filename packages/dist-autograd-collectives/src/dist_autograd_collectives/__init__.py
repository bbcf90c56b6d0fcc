"""Collectives that autograd sees, with the right gradient for every reduce op."""

from dist_autograd_collectives.arguments import Sizes
from dist_autograd_collectives.backend import CollectiveError
from dist_autograd_collectives.copies import (
    all_gather,
    all_gather_base,
    all_gather_cat,
    all_gather_stack,
    broadcast,
    gather,
    scatter,
)
from dist_autograd_collectives.exchanges import all_to_all, all_to_all_dim, all_to_all_single, permute
from dist_autograd_collectives.maps import Convention
from dist_autograd_collectives.participation import anchored, compare_calls, connect
from dist_autograd_collectives.reductions import ReduceOperation
from dist_autograd_collectives.started import Handle, start
from dist_autograd_collectives.sums import (
    all_reduce,
    all_reduce_coalesced,
    copy_to_group,
    reduce,
    reduce_scatter,
    reduce_scatter_dim,
)
from dist_utils import TensorMismatchError

_all_gather_base = all_gather_base

__all__ = [
    "CollectiveError",
    "Convention",
    "Handle",
    "ReduceOperation",
    "Sizes",
    "TensorMismatchError",
    "all_gather",
    "all_gather_base",
    "all_gather_cat",
    "all_gather_stack",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_dim",
    "all_to_all_single",
    "anchored",
    "broadcast",
    "compare_calls",
    "connect",
    "copy_to_group",
    "gather",
    "permute",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_dim",
    "scatter",
    "start",
]

__version__ = "2.1.2"
