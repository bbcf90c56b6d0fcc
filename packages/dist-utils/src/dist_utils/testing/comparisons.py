"""Bitwise comparisons: of two values on one rank, and of one value on all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups import GroupLike, collective_device, global_rank, resolve_group
from dist_utils.torch_compat import all_gather_single

__all__ = ["same_bits", "same_on_all_ranks"]


def same_bits(left: Any, right: Any) -> bool:
    """Return whether two values are bitwise equal: tensors, or containers of them.

    Tensors must have one dtype, shape and layout, and the same bits, those of NaN and of negative zero
    included; their strides and devices may differ. Mappings must have their keys in one order.

    Args:
        left: A tensor, a mapping, a list, a tuple, or anything else, which is compared with ``==``.
        right: Likewise.

    Example:
        >>> same_bits({"a": torch.tensor([0.0, float("nan")])}, {"a": torch.tensor([0.0, float("nan")])})
        True
        >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
        False
    """
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return (
            isinstance(left, torch.Tensor)
            and isinstance(right, torch.Tensor)
            and _kind(left) == _kind(right)
            and torch.equal(_bytes(left), _bytes(right))
        )
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return list(left) == list(right) and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return bool(left == right) or (left != left and right != right)  # noqa: PLR0124 - NaN


def same_on_all_ranks(values: Any, group: GroupLike = None) -> bool:
    """Return whether all ranks hold bitwise identical values; all ranks get the same answer.

    Args:
        values: A tensor, or mappings, lists and tuples of tensors and of what has a ``repr``.
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.

    Raises:
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        Collective: an all-gather of 32 bytes a rank, and a broadcast of the tensors' bytes.

    Example:
        >>> assert same_on_all_ranks(model.state_dict())  # doctest: +SKIP
    """
    resolved = resolve_group(group)
    device = collective_device(resolved)
    tensors: list[torch.Tensor] = []
    outline = "".join(_outline(values, tensors)).encode()
    mine = torch.frombuffer(bytearray(hashlib.sha256(outline).digest()), dtype=torch.uint8).to(device)
    everyone = mine.new_empty(resolved.size() * mine.numel())
    all_gather_single(everyone, mine, resolved)
    if not bool((everyone.view(resolved.size(), -1) == mine).all()):
        return False
    content = torch.cat([mine.new_empty(0), *(_bytes(tensor).to(device) for tensor in tensors)])
    first = content.clone()
    dist.broadcast(first, global_rank(resolved, 0), group=resolved)
    differs = (first != content).any().to(torch.int32)
    dist.all_reduce(differs, group=resolved)
    return not bool(differs)


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.layout]:
    return tensor.dtype, tensor.shape, tensor.layout


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _outline(values: Any, tensors: list[torch.Tensor]) -> Iterator[str]:
    """Describe everything except the contents of tensors, which are appended to ``tensors``."""
    if isinstance(values, torch.Tensor):
        tensors.append(values)
        yield repr(_kind(values))
    elif isinstance(values, Mapping):
        yield "{"
        for key, value in values.items():
            yield f"{key!r}:"
            yield from _outline(value, tensors)
        yield "}"
    elif isinstance(values, (list, tuple)):
        yield "["
        for value in values:
            yield from _outline(value, tensors)
            yield ","
        yield "]"
    else:
        yield repr(values)
