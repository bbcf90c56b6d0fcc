"""Quantize, average and restore values in blocks: one interface, several backends, the same bits.

The functions write to tensors that they are given, and have no gradient. ``torch.compile`` cannot trace them:
call them, and what is built on them, outside of compiled functions.
"""

from ddp_quant_hooks.kernels.affine import AffineLayout
from ddp_quant_hooks.kernels.call import VALUE_DTYPES
from ddp_quant_hooks.kernels.dispatch import (
    affine_decode,
    affine_encode,
    decode,
    decode_shards,
    describe,
    encode,
    encode_shards,
    not_finite,
    reduce,
)
from ddp_quant_hooks.kernels.layout import Layout

__all__ = [
    "VALUE_DTYPES",
    "AffineLayout",
    "Layout",
    "affine_decode",
    "affine_encode",
    "decode",
    "decode_shards",
    "describe",
    "encode",
    "encode_shards",
    "not_finite",
    "reduce",
]
