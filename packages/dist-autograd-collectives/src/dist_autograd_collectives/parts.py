"""Tensors put together for one message, and taken apart again, without losing a rank's way to backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor padded with rows of zeros to a length; the result depends on it even if it is empty."""
    missing = length - rows.shape[0]
    if 0 in rows.shape[1:]:  # torch 2.6 pads nothing that stays empty
        return rows.reshape(length, *rows.shape[1:])
    return torch.nn.functional.pad(rows, [0, 0] * (rows.ndim - 1) + [0, missing]) if missing else rows


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one flat tensor."""
    return concatenate([tensor.flatten() for tensor in tensors])


def concatenate(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors one after the other along dimension 0.

    The result depends on each of them, even on an empty one, so that backward, which the other ranks wait
    for, comes to all of them on this rank. ``torch.cat`` leaves empty tensors of one dimension out of the
    graph, but none of two; the same holds for the backward of ``torch.split``.
    """
    return torch.cat([tensor.unsqueeze(0) for tensor in tensors], 1).squeeze(0)


def split(joined: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Return the tensors that were concatenated."""
    return tuple(part.squeeze(0) for part in torch.split(joined.unsqueeze(0), list(lengths), 1))


def pieces(joined: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return tensors that were joined along the last dimension.

    They are views that may be changed in place, unlike those of ``torch.split``.
    """
    found, start = [], 0
    for shape in shapes:
        length = math.prod(shape)
        found.append(joined.narrow(-1, start, length).view((*joined.shape[:-1], *shape)))
        start += length
    return found
