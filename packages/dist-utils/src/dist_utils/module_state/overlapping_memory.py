"""Find tensors that share memory: a write to one of them changes the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["named_with_overlaps", "share_elements"]


def named_with_overlaps(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return names that say which tensor begins inside another one's memory, and where.

    They are identical on all ranks if and only if the tensors overlap in the same way. Interleaved views,
    such as columns, count as overlapping.

    Args:
        names: The names of the tensors.
        tensors: Of any kind; only dense ones are considered.
    """
    located = list(names)
    places = sorted(
        (tensor.data_ptr(), index)
        for index, tensor in enumerate(tensors)
        if tensor.layout is torch.strided and tensor.numel()
    )
    owner, begin, end = 0, 0, 0  # of the tensor that reaches furthest so far
    for start, index in places:
        if start < end:
            located[index] = f"{names[index]} ({start - begin} bytes into {names[owner]})"
        if (reach := start + _span(tensors[index])) > end:
            owner, begin, end = index, start, reach
    return located


def share_elements(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether two elements, of one tensor or of two, share memory.

    Exact: columns of one matrix share nothing, although they are interleaved.

    Args:
        tensors: Dense.

    Cost:
        A sort; for interleaved tensors also one byte of memory for each byte that they span.
    """
    near: list[torch.Tensor] = []  # their spans overlap
    end = 0
    for tensor in sorted((one for one in tensors if one.numel()), key=torch.Tensor.data_ptr):
        if tensor.data_ptr() >= end and near:
            if _written_twice(near):
                return True
            near = []
        near.append(tensor)
        end = max(end, tensor.data_ptr() + _span(tensor))
    return _written_twice(near)


def _written_twice(tensors: Sequence[torch.Tensor]) -> bool:
    """Mark every byte of the tensors in a scratch tensor, unless the answer is obvious."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return len(tensors) > 1
    if len(tensors) == 1 and _strides_keep_apart(tensors[0]):
        return False
    first = tensors[0].data_ptr()
    last = max(tensor.data_ptr() + _span(tensor) for tensor in tensors)
    written = torch.zeros(last - first, dtype=torch.bool, device="cpu")
    for tensor in tensors:
        size = tensor.element_size()
        strides = (*(stride * size for stride in tensor.stride()), 1)
        places = written.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - first)
        if places.any():
            return True
        before = 0 if (apart := _strides_keep_apart(tensor)) else int(written.sum())
        places.fill_(True)
        if not apart and int(written.sum()) - before < places.numel():
            return True
    return False


def _strides_keep_apart(tensor: torch.Tensor) -> bool:
    """Return whether every stride is larger than the span of all smaller ones."""
    reach = 0
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride <= reach:
            return False
        reach += stride * (length - 1)
    return True


def _span(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    steps = ((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.element_size()
