"""Average gradients in 32 or 16 bits: hooks for DistributedDataParallel, and a collective."""

from ddp_compress_hooks.hooks import allreduce_hook, bf16_compress_hook, compress_hook, fp16_compress_hook
from ddp_compress_hooks.state import CompressState
from ddp_compress_hooks.tensors import all_reduce
from ddp_compress_hooks.wrappers import bf16_compress_wrapper, fp16_compress_wrapper
from dist_utils.comm_hooks import CommHook

__all__ = [
    "CommHook",
    "CompressState",
    "all_reduce",
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "compress_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
]

__version__ = "1.1.3"
