"""Tensors put together for one message, and taken apart again, without losing a rank's way to backward."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dist_autograd_collectives.reductions import zeros_after


def pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor padded with rows of zeros to a length."""
    missing = length - rows.shape[0]
    if not missing:
        return rows
    # torch.cat leaves an empty tensor out of the graph; this rank would then not reach the backward. (And the
    # backward of torch.nn.functional.pad refuses to give an empty one in torch 2.6.)
    return torch.cat([rows, zeros_after(rows, rows.new_empty(missing, *rows.shape[1:]))])


def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one flat tensor, which depends on every tensor even if there are none."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if flat.numel():
        return flat
    for tensor in tensors:  # torch.cat leaves empty ones out of the graph
        flat = flat + tensor.flatten()
    return flat


def pieces(joined: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return tensors that were joined along the last dimension.

    They are views that may be changed in place, unlike those of ``torch.split``.
    """
    found, start = [], 0
    for shape in shapes:
        length = math.prod(shape)
        found.append(joined.narrow(-1, start, length).view(*joined.shape[:-1], *shape))
        start += length
    return found
