"""Checks of plain tensors (not buckets) before they are summed or averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.comm_hooks.buckets import GRADIENT_DTYPES
from dist_utils.module_state.broadcasts import obstacle


def checked_tensors(call: str, tensor: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a call's tensors, detached, if they can be written in place.

    Args:
        call: The name of the function, for messages.
        tensor: One tensor, or a sequence of them.

    Raises:
        TypeError: ``tensor`` is neither, or a tensor is sparse or not of a floating-point dtype.
        ValueError: A tensor is part of a graph or inside a transform of ``torch.func``, which would not see
            the change; or it holds no memory, like a ``DTensor``; or it is expanded, or given twice, and
            would be written twice. Other tensors that share memory are not noticed: give one of them.
    """
    tensors: Any = [tensor] if isinstance(tensor, torch.Tensor) else tensor
    if not isinstance(tensors, Sequence) or not all(isinstance(one, torch.Tensor) for one in tensors):
        raise TypeError(f"{call} takes a tensor or a sequence of tensors, got {_kinds_of(tensor)}")
    for number, one in enumerate(tensors):
        what = "the tensor" if one is tensor else f"tensor {number}"
        if one.layout is not torch.strided or one.is_nested or one.dtype not in GRADIENT_DTYPES:
            kind = "nested tensor" if one.is_nested else f"{one.layout} tensor"
            raise TypeError(
                f"{call}: {what} must be dense and of a floating-point dtype, got a {kind} of {one.dtype}"
            )
        if why := _why_not_writable(one):
            raise ValueError(f"{call}: {what} {why}")
    begins = [one.data_ptr() for one in tensors if one.numel()]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{call}: two of the tensors share memory: they begin at the same address")
    return [one.detach() for one in tensors]


def checked_operation(call: str, op: Any) -> bool:
    """Return whether ``op`` is the mean (``True``) or the sum (``False``).

    Raises:
        TypeError: ``op`` is not a reduce operation.
        ValueError: It is another operation.
    """
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise TypeError(f"{call}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op!r}")
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"{call}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op}")
    return bool(op == dist.ReduceOp.AVG)


def same_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the indices of all nonempty tensors by dtype and device.

    The kinds come in the order in which they first appear.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def _why_not_writable(one: torch.Tensor) -> str:
    if one.requires_grad and not one.is_leaf:
        return "is part of a graph, which would not see that it changes: give its detach()"
    if transformed := torch_compat.transformed_as(one):
        return f"is {transformed}, inside a transform, which would not see that it changes"
    if one.is_inference():
        return "was made in inference mode and cannot be written outside of it: give a clone"
    return obstacle(one)


def _kinds_of(given: object) -> str:
    if isinstance(given, Sequence) and not isinstance(given, str):
        kinds = sorted({type(one).__name__ for one in given})
        return f"a {type(given).__name__} of {', '.join(kinds)}"
    return f"a {type(given).__name__}"
