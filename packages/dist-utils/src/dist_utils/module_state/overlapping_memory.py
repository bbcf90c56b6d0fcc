"""Which tensors have memory in common: what is written into one of them is written into the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["named_with_overlaps"]


def named_with_overlaps(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return names that tell which tensor begins inside of another one's memory, and where.

    The same on all ranks if and only if their tensors lie over each other alike. Views that take turns in
    memory, as columns do, count as overlapping.

    Args:
        names: Of the tensors.
        tensors: Of any kind; only dense ones are looked at.
    """
    told = list(names)
    places = sorted(
        (tensor.data_ptr(), index)
        for index, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    owner, begin, end = 0, 0, 0  # of what reaches furthest so far
    for start, index in places:
        if start < end:
            told[index] = f"{names[index]} ({start - begin} bytes into {names[owner]})"
        if (reach := start + _span(tensors[index])) > end:
            owner, begin, end = index, start, reach
    return told


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()
