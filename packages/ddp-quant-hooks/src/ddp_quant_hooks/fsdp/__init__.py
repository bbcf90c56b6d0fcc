"""FSDP2: average gradients of ``fully_shard`` between nodes, or reduce and scatter them, in few bits."""

from ddp_quant_hooks.fsdp.all_reduce import quantize_all_reduce
from ddp_quant_hooks.fsdp.handle import Handle
from ddp_quant_hooks.fsdp.reduce_scatter import quantize_reduce_scatter

__all__ = ["Handle", "quantize_all_reduce", "quantize_reduce_scatter"]
