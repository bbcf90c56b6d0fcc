"""Tensors put together for one message, and taken apart again, without losing a rank's way to backward."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch

from dist_autograd_collectives.maps import Tensors


def pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor padded with rows of zeros to a length; the result depends on it even if it is empty."""
    # Not torch.nn.functional.pad: torch 2.6 pads nothing that is empty afterwards, or backward.
    missing = length - rows.shape[0]
    return concatenate([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows


def as_rows(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return the tensors, those without dimensions as a row: what is sent has rows, along dimension 0."""
    return tuple([tensor if tensor.ndim else tensor.view(1) for tensor in tensors])


def count(shape: Sequence[int]) -> int:
    """Return how many rows :func:`as_rows` makes of a tensor of this shape."""
    return shape[0] if shape else 1


def of_shape(received: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in another shape; a view is made, with its place in the graph, only if it differs."""
    return received if received.shape == shape else received.view(shape)


def flatten_all(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one flat tensor."""
    return concatenate(flatten_each(tensors))


def flatten_each(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return each tensor's elements in a flat one."""
    return tuple([tensor.flatten() for tensor in tensors])


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return tensors one after the other along a dimension, in their dtype, also under autocast.

    The result depends on each of them, even on an empty one, so that backward, which the other ranks wait
    for, comes to all of them on this rank. ``torch.cat`` leaves empty tensors of one dimension out of the
    graph, but none of two; the same holds for the backward of ``torch.split``.
    """
    with _without_autocast(tensors[0].device.type):
        return torch.cat([tensor.unsqueeze(0) for tensor in tensors], 1 + dim).squeeze(0)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which dtypes stay as they are: a rank that pads must not differ from others."""
    if torch.compiler.is_compiling() or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def split(joined: torch.Tensor, lengths: Sequence[int]) -> Tensors:
    """Return the tensors that were concatenated along dimension 0."""
    return tuple(part.squeeze(0) for part in torch.split(joined.unsqueeze(0), list(lengths), 1))


def views_of_shapes(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> Tensors:
    """Return the tensors whose elements :func:`flatten_all` has put into one.

    They are views that may be changed in place, unlike those of ``torch.split``.
    """
    found, start = [], 0
    for shape in shapes:
        length = math.prod(shape)
        found.append(flat.narrow(0, start, length).view(shape))
        start += length
    return tuple(found)


def as_real(tensors: Tensors) -> Tensors:
    """Return complex tensors as their real and imaginary parts, which every backend supports."""
    # Not view_as_real, because gradients may come back with any strides.
    return tuple(concatenate([x.real.unsqueeze(-1), x.imag.unsqueeze(-1)], x.ndim) for x in tensors)


def as_complex(tensors: Tensors) -> Tensors:
    """Return the complex tensors of real and imaginary parts; the reverse of :func:`as_real`."""
    return tuple(torch.complex(x[..., 0], x[..., 1]) for x in tensors)
