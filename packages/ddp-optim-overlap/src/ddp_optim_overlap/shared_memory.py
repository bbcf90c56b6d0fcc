"""Parameters that are different objects over the same memory, which a step moves one after another."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch

from ddp_optim_overlap.errors import ConfigError

__all__ = ["require_separate_memory"]


def require_separate_memory(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if two parameters of the optimizers share values: buckets change the order of their steps.

    Raises:
        ConfigError: Two parameters share values.

    Cost:
        For parameters whose memory ranges overlap, even if no values do, one byte per value in the ranges.
    """
    owned = {parameter for one in optimizers for group in one.param_groups for parameter in group["params"]}
    in_storage: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter in owned:
        if parameter.layout is torch.strided and parameter.numel() and not parameter.is_meta:
            in_storage[parameter.untyped_storage().data_ptr()].append(parameter)
    for together in in_storage.values():
        together.sort(key=torch.Tensor.data_ptr)
        for place, one in enumerate(together):
            for other in itertools.islice(together, place + 1, None):
                if other.data_ptr() >= one.data_ptr() + _extent(one) * one.element_size():
                    break
                if _share_values(one, other):
                    raise ConfigError(
                        f"two parameters, of shapes {tuple(one.shape)} and {tuple(other.shape)}, share "
                        "memory: each has a gradient of its own, and by buckets their steps would come in "
                        "another order. Let both places have one Parameter, or use OverlapMode.AFTER_REDUCE"
                    )


def _extent(tensor: torch.Tensor) -> int:
    """Return the number of elements in memory from a tensor's first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _share_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have an element in common; ``one`` must begin first in memory."""
    if one.dtype != other.dtype:
        return True
    apart = other.storage_offset() - one.storage_offset()
    taken = torch.zeros(max(_extent(one), apart + _extent(other)), dtype=torch.bool, device="cpu")
    taken.as_strided(one.shape, one.stride()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), apart).any())
