"""FSDP's reduce-scatter of gradients, in few bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.collectives import reduce_scatter_tensor
from ddp_quant_hooks.keys_of_pass import KeysOfPass
from ddp_quant_hooks.sharded_modules import reduce_scatter_base
from ddp_quant_hooks.state import QuantizedAllreduceState

__all__ = ["is_quantized", "reduce_scatter_class"]


def is_quantized(reduce_scatter: object) -> bool:
    """Return whether a reduce-scatter is one of these."""
    return bool(getattr(reduce_scatter, "quantized", False))


def reduce_scatter_class(
    state: QuantizedAllreduceState, before_first: Callable[[], None]
) -> Callable[[str], Any]:
    """Return the class of the reduce-scatters of one model. Its instances take the key of a module.

    Args:
        state: The state that reduces.
        before_first: Called before anything is reduced. Lives as long as the class.
    """
    base: Any = reduce_scatter_base()
    keys = KeysOfPass()

    class QuantizedReduceScatter(base):  # type: ignore[misc] # torch's class, where there is one
        """The reduce-scatter of one module."""

        quantized = True

        def __init__(self, key: str) -> None:
            self._key = key

        def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            """Return memory for an input or an output."""
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            op: Any,
            async_op: bool = False,
        ) -> None:
            """Reduce the module's gradients, and return when that is done."""
            del group, async_op  # the state has its own; FSDP does not wait for a result
            if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                raise ValueError(
                    f"quantize_reduce_scatter: module {self._key!r}: FSDP asks for neither sum nor mean, "
                    "but for a sum of scaled gradients: call set_force_sum_reduction_for_comms(True) "
                    "where a divide factor is set"
                )
            before_first()
            keys.begin()
            key = state.stand_ins.key_for(keys.next(self._key), input_tensor)
            reduce_scatter_tensor(output_tensor, input_tensor, op, state, key=key)

    return QuantizedReduceScatter
