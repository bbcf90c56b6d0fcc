"""Averages of gradients in 8 or 4 bits: hooks of DistributedDataParallel, and collectives."""

from ddp_quant_hooks.auto.state import AutoState, CandidateError, auto_hook
from ddp_quant_hooks.auto.trial import Choice
from ddp_quant_hooks.hook import quantized_allreduce_hook
from ddp_quant_hooks.lowrank.hook import low_rank_hook
from ddp_quant_hooks.lowrank.state import LowRankState
from ddp_quant_hooks.states import HierarchicalAllreduceState, QuantizedAllreduceState
from ddp_quant_hooks.statistics import Statistics
from ddp_quant_hooks.tensors.all_reduce import all_reduce
from ddp_quant_hooks.tensors.shards import reduce_scatter_tensor
from ddp_quant_hooks.torch_hooks import quantization_perchannel_hook, quantization_pertensor_hook

__all__ = [
    "AutoState",
    "CandidateError",
    "Choice",
    "HierarchicalAllreduceState",
    "LowRankState",
    "QuantizedAllreduceState",
    "Statistics",
    "all_reduce",
    "auto_hook",
    "low_rank_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_allreduce_hook",
    "reduce_scatter_tensor",
]

__version__ = "1.2.3"
