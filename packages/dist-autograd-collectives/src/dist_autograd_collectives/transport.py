"""Steps that several functions share: tensors of any dtype, stride and shape, and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from dist_autograd_collectives.calls import Call, Members, Tensors, padded_parts
from dist_autograd_collectives.reductions import Reduction
from dist_autograd_collectives.steps import Step

__all__ = ["as_tuple", "identity", "joined", "pieces", "reduced_for_all", "reduced_for_each", "sent"]

T = TypeVar("T")


def sent(tensors: Sequence[torch.Tensor], call: Call, after: Callable[..., T | Step[T]]) -> Step[T]:
    """Send tensors of one dtype; complex ones as real and imaginary parts, which every backend supports."""
    if not tensors[0].is_complex():
        return Step(tuple(tensors), call, after)
    # Not view_as_real, because gradients may come back with any strides.
    real = tuple(torch.stack((tensor.real, tensor.imag), -1) for tensor in tensors)
    return Step(real, call, lambda *received: after(*(torch.complex(x[..., 0], x[..., 1]) for x in received)))


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements in one flat tensor, which depends on every tensor even if there are none."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    if flat.numel():
        return flat
    for tensor in tensors:  # torch.cat leaves empty ones out of the graph
        flat = flat + tensor.flatten()
    return flat


def reduced_for_each(
    parts: Sequence[torch.Tensor],
    who: Members,
    op: Reduction,
    title: str,
    after: Callable[[torch.Tensor], T | Step[T]],
) -> Step[T]:
    """Reduce the ``r``-th of W tensors of one shape to rank ``r``.

    Anything but a sum is reduced at its destination, from all ranks' parts: that sends as many bytes as a
    ring, and uses torch's own gradients.
    """
    if op.is_sum:
        call, dtype = Call("reduce_scatter", who, title, separate_input=True), parts[0].dtype
        return sent(
            [op.scaled(part, who.size) for part in parts],
            call,
            lambda total: after(op.finished(total, who.size, dtype)),
        )
    splits = (1,) * who.size
    call = Call("exchange", who, title, input_splits=splits, output_splits=splits, separate_input=True)
    return sent([part.unsqueeze(0) for part in parts], call, lambda received: after(op.reduced(received)))


def reduced_for_all(
    tensor: torch.Tensor,
    who: Members,
    op: Reduction,
    title: str,
    after: Callable[[torch.Tensor], T | Step[T]],
    *,
    replicated: bool,
) -> Step[T]:
    """Reduce a tensor for all ranks."""
    prefix = "replicated " if replicated else ""
    if op.is_sum:
        call, dtype = Call(f"{prefix}all_reduce", who, title), tensor.dtype
        return sent(
            [op.scaled(tensor, who.size)], call, lambda total: after(op.finished(total, who.size, dtype))
        )

    def then_for_all(part: torch.Tensor) -> Step[T]:
        call = Call(f"{prefix}all_gather", who, title)
        return sent([part], call, lambda whole: after(whole[: tensor.numel()].view(tensor.shape)))

    return reduced_for_each(padded_parts(tensor, who).unbind(0), who, op, title, then_for_all)


def identity(result: torch.Tensor) -> torch.Tensor:
    """Return the received tensor unchanged."""
    return result


def as_tuple(*results: torch.Tensor) -> Tensors:
    """Return the received tensors as a tuple."""
    return results


def pieces(flat: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Return parts of a flat tensor, as views that may be changed in place, unlike those of torch.split."""
    found, start = [], 0
    for length in lengths:
        found.append(flat.narrow(0, start, length))
        start += length
    return found
