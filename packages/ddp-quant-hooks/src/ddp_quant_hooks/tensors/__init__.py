"""Collectives of plain tensors (not buckets), with 8 or 4 bits a value on the wire."""

from ddp_quant_hooks.tensors.all_reduce import all_reduce
from ddp_quant_hooks.tensors.shards import reduce_scatter_tensor

__all__ = ["all_reduce", "reduce_scatter_tensor"]
