"""Many small tensors in one collective."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    checked_dim,
    checked_sizes,
    is_replicated,
    kind_of,
    one_kind,
)
from dist_autograd_collectives.calls import Call, Tensors, members
from dist_autograd_collectives.compared_calls import agree
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.transport import joined, pieces, reduced_for_all, reduced_for_each, sent
from dist_utils import GroupLike

__all__ = ["all_gather_cat_coalesced", "all_reduce_coalesced", "reduce_scatter_dim_coalesced"]


@collective
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[Tensors]:
    """Reduce several tensors over all ranks at once: :func:`all_reduce` of each.

    Gradient: as for :func:`all_reduce`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: There are no tensors, or they have several dtypes or devices; or this rank is not in the
            group.

    Cost:
        One :func:`all_reduce` of all bytes, and a copy of them.

    Source:
        ``torch.distributed._functional_collectives.all_reduce_coalesced``.
    """
    who, replicated = members(group), is_replicated(grad)
    tensors = one_kind("tensors", tensors)
    reduction = Reduction.parse(op, tensors[0])
    tensors = [anchored(tensor, anchor) for tensor in tensors]
    title = f"all_reduce_coalesced({reduction.name})"
    agree(check, who, f"{title}, {grad}", tensors)

    def separated(flat: torch.Tensor) -> Tensors:
        parts = pieces(flat, [tensor.numel() for tensor in tensors])
        return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))

    return reduced_for_all(joined(tensors), who, reduction, title, separated, replicated=replicated)


@collective
def all_gather_cat_coalesced(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[Tensors]:
    """Concatenate each of several tensors over all ranks at once: :func:`all_gather_cat` of each.

    Gradient: as for :func:`all_gather_cat`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        dim: The dimension along which they are concatenated.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        IndexError: A tensor has no such dimension.
        ValueError: There are no tensors, or they have several dtypes or devices; or this rank is not in the
            group.

    Cost:
        One all-gather of all bytes, and two copies of them.

    Source:
        ``torch.distributed._functional_collectives.all_gather_into_tensor_coalesced``.
    """
    who = members(group)
    kind = kind_of("all_gather", grad)
    tensors = one_kind("tensors", tensors)
    dims = [checked_dim(tensor.ndim, dim) for tensor in tensors]
    tensors = [anchored(tensor, anchor) for tensor in tensors]
    agree(check, who, f"all_gather_cat_coalesced, {dims}, {grad}", tensors)
    rows = [tensor.movedim(place, 0) for tensor, place in zip(tensors, dims, strict=True)]
    flat = joined(rows)

    def separated(whole: torch.Tensor) -> Tensors:
        parts = torch.split(whole.view(who.size, -1), [row.numel() for row in rows], dim=1)
        return tuple(
            part.reshape(who.size * row.shape[0], *row.shape[1:]).movedim(0, place)
            for part, row, place in zip(parts, rows, dims, strict=True)
        )

    return sent([flat], Call(kind, who, "all_gather_cat_coalesced"), separated)


@collective
def reduce_scatter_dim_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    dim: int = 0,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[Tensors]:
    """Reduce several tensors at once, a part of each for each rank: :func:`reduce_scatter_dim` of each.

    Gradient: as for :func:`reduce_scatter_dim`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        dim: The dimension along which they are cut into W equal parts.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        IndexError: A tensor has no such dimension.
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: There are no tensors, they have several dtypes or devices, or a length cannot be
            divided by W; or this rank is not in the group.

    Cost:
        One reduce-scatter of all bytes, and a copy of them.

    Source:
        ``torch.distributed._functional_collectives.reduce_scatter_tensor_coalesced``.
    """
    is_replicated(grad)
    who = members(group)
    tensors = one_kind("tensors", tensors)
    reduction = Reduction.parse(op, tensors[0])
    dims = [checked_dim(tensor.ndim, dim) for tensor in tensors]
    for tensor, place in zip(tensors, dims, strict=True):
        checked_sizes(f"dimension {place}", tensor.shape[place], None, who)
    tensors = [anchored(tensor, anchor) for tensor in tensors]
    title = f"reduce_scatter_dim_coalesced({reduction.name})"
    agree(check, who, f"{title}, {dims}", tensors)
    rows = [tensor.movedim(place, 0) for tensor, place in zip(tensors, dims, strict=True)]
    cut = [row.reshape(who.size, row.shape[0] // who.size, *row.shape[1:]) for row in rows]
    parts = [joined([tensor[rank] for tensor in cut]) for rank in range(who.size)]

    def separated(flat: torch.Tensor) -> Tensors:
        shapes = [tensor.shape[1:] for tensor in cut]
        cut_out = pieces(flat, list(map(math.prod, shapes)))
        return tuple(
            piece.view(shape).movedim(0, place)
            for piece, shape, place in zip(cut_out, shapes, dims, strict=True)
        )

    return reduced_for_each(parts, who, reduction, title, separated)
