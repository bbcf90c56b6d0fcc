"""Collectives along any dimension that need no output buffers, with equal or unequal parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    checked_dim,
    checked_sizes,
    is_replicated,
    kind_of,
    sizes_of_others,
)
from dist_autograd_collectives.calls import Call, Members, members
from dist_autograd_collectives.compared_calls import agree, agree_on_splits
from dist_autograd_collectives.connecting import zeros_after
from dist_autograd_collectives.linear import linear
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.tensor_arguments import check_tensor
from dist_autograd_collectives.transport import reduced_for_each, sent
from dist_utils import GroupLike

__all__ = [
    "all_gather_cat",
    "all_gather_stack",
    "all_to_all_dim",
    "reduce_scatter_dim",
]

Sizes: TypeAlias = Sequence[int] | Literal["auto"] | None
"""Lengths of the ranks' parts: given, asked for (``"auto"``), or equal (``None``)."""


@collective
def all_gather_cat(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Give every rank all ranks' tensors, concatenated along a dimension in rank order.

    Gradient of rank r: its own part of the sum of all ranks' cotangents; with ``grad="replicated"`` of this
    rank's cotangent.

    Args:
        tensor: One dimension or more. Same dtype and, except along ``dim``, same shape on all ranks.
        dim: The dimension along which they are concatenated.
        sizes: Lengths of all ranks' tensors along ``dim``: ``None`` if they are equal, a list of W numbers if
            they are known, ``"auto"`` to ask the other ranks.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        A tensor whose length along ``dim`` is the sum of all ranks'.

    Raises:
        IndexError: There is no such dimension.
        ValueError: ``sizes`` are not W numbers, or wrong for this rank's tensor; or this rank is not
            in the group.

    Cost:
        W - 1 times the bytes of the longest tensor, forward and backward; with ``"replicated"`` nothing
        backward. ``"auto"`` adds an all-gather of one number, which the host waits for.

    Source:
        ``torch.distributed._functional_collectives.all_gather_tensor``, which supports equal sizes only.

    Example:
        >>> tokens = all_gather_cat(mine, dim=1, sizes="auto")  # doctest: +SKIP
    """
    who = members(group)
    check_tensor("tensor", tensor)
    dim = checked_dim(tensor.ndim, dim)
    kind = kind_of("all_gather", grad)
    lengths = _known_sizes("sizes", tensor.shape[dim], sizes, who)
    tensor = anchored(tensor, anchor)
    title = f"all_gather_cat, {dim}, {lengths or sizes}, {grad}"
    agree(check, who, title, [tensor], uneven_dim=None if sizes is None else dim)
    rows = tensor.movedim(dim, 0)
    call = Call(kind, who, "all_gather_cat")
    if sizes is None:
        return sent([rows], call, lambda whole: whole.movedim(0, dim))
    lengths = lengths or _exchange_lengths([rows.shape[0]] * who.size, rows, who)
    longest = max(lengths)

    def unpadded(whole: torch.Tensor) -> torch.Tensor:
        parts = whole.view(who.size, longest, *whole.shape[1:]).unbind(0)
        return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).movedim(0, dim)

    return sent([_padded(rows, longest)], call, unpadded)


@collective
def all_gather_stack(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Give every rank all ranks' tensors, stacked along a new dimension in rank order.

    Gradient of rank r: its own entry of the sum of all ranks' cotangents; with ``grad="replicated"`` of this
    rank's cotangent.

    Args:
        tensor: Same shape and dtype on all ranks; may have no dimension.
        dim: The new dimension's position in the result; its length is W.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        IndexError: The result has no such dimension.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.stack`` of ``torch.distributed.nn.functional.all_gather``, with one copy less.
    """
    who = members(group)
    check_tensor("tensor", tensor)
    row = tensor.unsqueeze(0)
    dim = checked_dim(row.ndim, dim)
    kind = kind_of("all_gather", grad)
    row = anchored(row, anchor)
    agree(check, who, f"all_gather_stack, {dim}, {grad}", [row])
    return sent([row], Call(kind, who, "all_gather_stack"), lambda rows: rows.movedim(0, dim))


@collective
def reduce_scatter_dim(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Reduce all ranks' tensors and give each rank its part along a dimension.

    Gradient of the part of rank s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        tensor: Same shape and dtype on all ranks.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        dim: The dimension along which it is cut.
        sizes: Lengths of the W parts, the same on all ranks; ``None`` for equal ones.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        This rank's part, whose length along ``dim`` is ``sizes[rank]``.

    Raises:
        IndexError: There is no such dimension.
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: ``sizes`` do not add up to the length, or it cannot be divided by W; or this rank is not
            in the group.

    Cost:
        W - 1 times the bytes of the longest part, forward and backward.

    Source:
        ``torch.distributed._functional_collectives.reduce_scatter_tensor``, whose gradient covers SUM only.
    """
    is_replicated(grad)
    who = members(group)
    check_tensor("tensor", tensor)
    dim = checked_dim(tensor.ndim, dim)
    lengths = checked_sizes("sizes", tensor.shape[dim], sizes, who)
    reduction = Reduction.parse(op, tensor)
    tensor = anchored(tensor, anchor)
    title = f"reduce_scatter_dim({reduction.name})"
    agree(check, who, f"{title}, {dim}, {list(lengths)}", [tensor])
    longest = max(lengths)
    parts = [_padded(part, longest) for part in torch.split(tensor.movedim(dim, 0), list(lengths))]
    mine = lengths[who.rank]
    return reduced_for_each(parts, who, reduction, title, lambda part: part[:mine].movedim(0, dim))


@collective
def all_to_all_dim(
    tensor: torch.Tensor,
    split_dim: int,
    cat_dim: int,
    *,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sizes = None,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Split a tensor along one dimension, send the ``r``-th part to rank ``r``, and join what arrives.

    Gradient: the cotangents are sent back the same way.

    Args:
        tensor: Same dtype on all ranks.
        split_dim: The dimension along which it is split.
        cat_dim: The dimension along which the received parts are joined. If it is not ``split_dim`` (from
            shards of a sequence to shards of heads, say), ``input_sizes`` must be the same on all ranks.
        input_sizes: Lengths of the sent parts along ``split_dim``; ``None`` for equal ones.
        output_sizes: Lengths of the received parts along ``cat_dim``: ``None`` if they are as long as the
            part that this rank keeps, W numbers, or ``"auto"`` to ask.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        IndexError: There is no such dimension.
        ValueError: ``input_sizes`` do not add up to the length, or it cannot be divided by W;
            ``output_sizes`` are not W lengths, or wrong for the part that this rank keeps; or this rank is
            not in the group.

    Cost:
        The bytes of the parts for others, forward and backward. ``"auto"`` adds an exchange of one number,
        which the host waits for.

    Source:
        ``jax.lax.all_to_all``.

    Example:
        >>> heads = all_to_all_dim(tokens, split_dim=2, cat_dim=1)  # doctest: +SKIP
    """
    is_replicated(grad)
    who = members(group)
    check_tensor("tensor", tensor)
    split_dim, cat_dim = checked_dim(tensor.ndim, split_dim), checked_dim(tensor.ndim, cat_dim)
    lengths = checked_sizes("input_sizes", tensor.shape[split_dim], input_sizes, who)
    kept = list(tensor.shape)
    kept[split_dim] = lengths[who.rank]
    known = _known_sizes("output_sizes", kept[cat_dim], output_sizes, who)
    tensor = anchored(tensor, anchor)
    cut = f", {list(lengths)}" if cat_dim != split_dim else ""
    asked = ", 'auto'" if output_sizes is not None and not known else ""
    agree(check, who, f"all_to_all_dim, {split_dim}, {cat_dim}{cut}{asked}", [tensor], uneven_dim=cat_dim)
    if output_sizes is None:
        received = (kept[cat_dim],) * who.size
    else:
        received = known or _exchange_lengths(
            lengths if cat_dim == split_dim else (kept[cat_dim],) * who.size, tensor, who
        )
    # The split dimension goes first, so that every part is contiguous in memory.
    rows = tensor.movedim(split_dim, 0)
    row = math.prod(rows.shape[1:])
    shapes = [[*kept[:cat_dim], length, *kept[cat_dim + 1 :]] for length in received]
    outgoing = tuple(length * row for length in lengths)
    incoming = tuple(map(math.prod, shapes))
    agree_on_splits(check, who, outgoing, incoming)

    def joined(flat: torch.Tensor) -> torch.Tensor:
        if cat_dim == split_dim:
            return flat.view(sum(received), *rows.shape[1:]).movedim(0, split_dim)
        parts = [
            part.view([shape[split_dim], *shape[:split_dim], *shape[split_dim + 1 :]]).movedim(0, split_dim)
            for part, shape in zip(torch.split(flat, list(incoming)), shapes, strict=True)
        ]
        return torch.cat(parts, cat_dim)

    call = Call("exchange", who, "all_to_all_dim", input_splits=outgoing, output_splits=incoming)
    return sent([rows.flatten()], call, joined)


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return a tensor padded with rows of zeros to a length."""
    missing = length - rows.shape[0]
    if not missing:
        return rows
    # torch.cat leaves an empty tensor out of the graph; this rank would then not reach the backward.
    return torch.cat([rows, zeros_after(rows, rows.new_empty(missing, *rows.shape[1:]))])


def _known_sizes(label: str, own: int, sizes: Sizes, who: Members) -> tuple[int, ...]:
    """Return the given sizes, checked; empty if none were given or the ranks must be asked."""
    if sizes is None:
        return ()
    if isinstance(sizes, str) and sizes != "auto":
        raise ValueError(f"{label} must be None, 'auto' or {who.size} lengths, got {sizes!r}")
    if sizes != "auto":
        return sizes_of_others(label, own, sizes, who)
    if torch.compiler.is_compiling():
        raise ValueError(
            f"{label}='auto' cannot be traced by torch.compile: only other ranks know the shapes"
        )
    return ()


def _exchange_lengths(lengths: Sequence[int], like: torch.Tensor, who: Members) -> tuple[int, ...]:
    """Send each rank a length, and return the lengths that the ranks send to this one."""
    telling = torch.tensor(lengths, dtype=torch.int64, device=like.device)
    (told,) = linear((telling,), Call("exchange", who, "sizes='auto'"))
    return tuple(told.tolist())
