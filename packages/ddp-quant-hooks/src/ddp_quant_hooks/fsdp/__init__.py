"""FSDP2 in few bits: parameters are gathered, and gradients are reduced and scattered or averaged."""

from ddp_quant_hooks.fsdp.all_gather import GatherHandle, quantize_all_gather
from ddp_quant_hooks.fsdp.all_reduce import quantize_all_reduce
from ddp_quant_hooks.fsdp.gather_statistics import GatherStatistics
from ddp_quant_hooks.fsdp.handle import Handle
from ddp_quant_hooks.fsdp.reduce_scatter import quantize_reduce_scatter

__all__ = [
    "GatherHandle",
    "GatherStatistics",
    "Handle",
    "quantize_all_gather",
    "quantize_all_reduce",
    "quantize_reduce_scatter",
]
