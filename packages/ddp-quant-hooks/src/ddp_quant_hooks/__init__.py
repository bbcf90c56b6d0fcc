"""DistributedDataParallel communication hooks that average gradients in 8 or 4 bits."""

from ddp_quant_hooks.affine_hooks import quantization_perchannel_hook, quantization_pertensor_hook
from ddp_quant_hooks.hierarchical import HierarchicalAllreduceState
from ddp_quant_hooks.hooks import quantized_allreduce_hook
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import Statistics

__all__ = [
    "HierarchicalAllreduceState",
    "QuantizedAllreduceState",
    "Statistics",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "quantized_allreduce_hook",
]

__version__ = "0.3.1"
