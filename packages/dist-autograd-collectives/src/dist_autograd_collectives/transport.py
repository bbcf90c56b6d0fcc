"""Tensors of any dtype, stride and shape as the linear collectives want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dist_autograd_collectives.linear import Members, linear, padded_parts
from dist_autograd_collectives.reductions import is_sum, reduce_stacked, scaled_for_sum

__all__ = ["all_reduced", "as_real", "averaged", "joined", "reduce_scattered", "sent_in_parts"]


def as_real(tensor: torch.Tensor, collective: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Run a linear collective on a complex tensor's real and imaginary parts: not every backend knows it."""
    if not tensor.is_complex():
        return collective(tensor)
    # Not view_as_real: gradients of any stride come back through this.
    parts = collective(torch.stack((tensor.real, tensor.imag), -1))
    return torch.complex(parts[..., 0], parts[..., 1])


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one flat tensor, which depends on every tensor even if there are none."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if flat.numel():
        return flat
    for tensor in tensors:  # torch.cat leaves empty ones out of the graph
        flat = flat + tensor.flatten()
    return flat


def sent_in_parts(parts: torch.Tensor, who: Members) -> torch.Tensor:
    """Send the ``r``-th of the parts along dimension 0 to rank ``r``; return all ranks' for this one."""
    splits = (parts.shape[0] // who.size,) * who.size
    return as_real(parts, lambda x: linear(x, "exchange", who, input_splits=splits, output_splits=splits))


def reduce_scattered(parts: torch.Tensor, who: Members, name: str, factor: object) -> torch.Tensor:
    """Reduce the ``r``-th of the W entries along dimension 0 to rank ``r``.

    What is no sum is reduced where it ends, from all ranks' parts: the bytes of a ring, and torch's own
    gradients.
    """
    if not is_sum(name):
        return reduce_stacked(sent_in_parts(parts, who), name)
    parts = scaled_for_sum(parts, name, factor)
    total = as_real(parts, lambda x: linear(x, "reduce_scatter", who))[0]
    return averaged(total, who) if name == "AVG" else total


def all_reduced(
    tensor: torch.Tensor, who: Members, name: str, factor: object, *, replicated: bool
) -> torch.Tensor:
    """Reduce a tensor for all ranks."""
    prefix = "replicated " if replicated else ""
    if is_sum(name):
        tensor = scaled_for_sum(tensor, name, factor)
        total = as_real(tensor, lambda x: linear(x, f"{prefix}all_reduce", who))
        return averaged(total, who) if name == "AVG" else total
    part = reduce_scattered(padded_parts(tensor, who), who, name, factor)
    whole = as_real(part, lambda x: linear(x, f"{prefix}all_gather", who))
    return whole[: tensor.numel()].view(tensor.shape)


def averaged(total: torch.Tensor, who: Members) -> torch.Tensor:
    """Divide a sum by the number of ranks, integers towards zero."""
    if total.is_floating_point() or total.is_complex():
        return total / who.size
    return torch.div(total, who.size, rounding_mode="trunc")
