"""Bitwise comparisons: of two values on one rank, and of one value on all ranks."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dist_utils.process_groups.groups import GroupLike, resolve_group
from dist_utils.process_groups.messages import all_gather_plain


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
        Collective: two small all-gathers. Tensors are copied to the CPU and hashed there.

    Example:
        >>> assert same_on_all_ranks(model.state_dict())  # doctest: +SKIP
    """
    resolved = resolve_group(group)
    digest = hashlib.sha256()
    for part in _parts(values):
        digest.update(part)
    return len(set(all_gather_plain(resolved, digest.hexdigest()))) == 1


def _kind(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.layout]:
    return tensor.dtype, tensor.shape, tensor.layout


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = dense.cpu().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _parts(values: Any) -> Iterator[bytes]:
    """Yield all that a comparison with other ranks depends on."""
    if isinstance(values, torch.Tensor):
        content = _bytes(values)
        yield repr(_kind(values)).encode()
        yield ctypes.string_at(content.data_ptr(), content.numel())
    elif isinstance(values, Mapping):
        yield b"{"
        for key, value in values.items():
            yield f"{key!r}:".encode()
            yield from _parts(value)
        yield b"}"
    elif isinstance(values, (list, tuple)):
        yield b"["
        for value in values:
            yield from _parts(value)
            yield b","
        yield b"]"
    elif isinstance(values, (Iterator, torch.nn.Module)):
        raise TypeError(f"a {type(values).__name__} cannot be compared: give a list, or a state_dict")
    else:
        yield repr(values).encode()
