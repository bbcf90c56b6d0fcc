"""Collectives of plain tensors (not buckets), with 8 or 4 bits a value on the wire."""

from ddp_quant_hooks.collectives.all_gather import all_gather_into_tensor
from ddp_quant_hooks.collectives.reduce_scatter import reduce_scatter_tensor
from ddp_quant_hooks.collectives.whole_tensors import all_reduce

__all__ = ["all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"]
