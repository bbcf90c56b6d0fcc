"""The old path of ``ddp_quant_hooks.kernels.Layout``, deprecated until 1.0."""

import warnings

from ddp_quant_hooks.wire_format import Layout

__all__ = ["Layout"]

warnings.warn(
    "ddp_quant_hooks.messages is deprecated: import Layout from ddp_quant_hooks.kernels",
    DeprecationWarning,
    stacklevel=2,
)
