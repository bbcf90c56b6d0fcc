"""The collectives of torch.distributed.nn.functional, with mathematically correct gradients."""

from dist_autograd_collectives.copies import all_gather, all_gather_base, broadcast, gather, scatter
from dist_autograd_collectives.exchanges import all_to_all, all_to_all_single
from dist_autograd_collectives.sums import all_reduce, reduce, reduce_scatter

__all__ = [
    "all_gather",
    "all_gather_base",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]
