"""Averages of gradients in 8 or 4 bits: hooks of DistributedDataParallel, and collectives."""

from ddp_quant_hooks.affine_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from ddp_quant_hooks.auto_choice import Choice
from ddp_quant_hooks.auto_hooks import auto_hook
from ddp_quant_hooks.auto_passes import CandidateError
from ddp_quant_hooks.auto_state import AutoState
from ddp_quant_hooks.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.hooks import quantized_allreduce_hook
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import Statistics

__all__ = [
    "AutoState",
    "CandidateError",
    "Choice",
    "HierarchicalAllreduceState",
    "QuantizedAllreduceState",
    "Statistics",
    "all_gather_into_tensor",
    "all_reduce",
    "auto_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_allreduce_hook",
    "reduce_scatter_tensor",
]

__version__ = "1.0.0.dev0"
