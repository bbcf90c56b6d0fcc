"""Collectives that reduce, and ``copy_to_group``, whose gradient is a reduction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives import arguments
from dist_autograd_collectives.calls import Call, Convention, Map, Tensors, members
from dist_autograd_collectives.collective import collective, identity, prepare, step
from dist_autograd_collectives.parts import concatenate, join, pad, pieces
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_utils import GroupLike

T = TypeVar("T")


@collective
def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result, as a new tensor.

    Gradient of rank r, where g_s is rank s's cotangent, G the sum of all g_s (g_r with
    ``grad="replicated"``), and W the world size:

    - SUM: G.
    - AVG: G / W.
    - MAX, MIN: G where x_r is the extremum, shared equally among the ranks that tie or that hold a NaN; else
      0.
    - PRODUCT: G times the product of the other ranks' values, exact with zeros.

    Args:
        tensor: Any dtype that the operation supports. Same shape and dtype on all ranks; any strides. Gloo
            adds 16-bit numbers in fp32, but above 64 KiB over more than two ranks in 16 bits.
        op: A ``ReduceOp`` or its name, as in ``"max"``. Instead of PREMUL_SUM, multiply the tensor first.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if ``tensor`` needs no gradient here. Use it if only some ranks'
            tensors need one: without it the others would wait for this rank, which never comes.
        check: Compare the ranks' functions and arguments first: one all-gather of 33 bytes. ``None``: only
            if the environment variable ``DIST_AUTOGRAD_CHECK`` is set (to ``1``, say). Nothing is compared
            while ``torch.compile`` traces.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.
        TensorMismatchError: With ``check``: on every rank, if the ranks' calls do not fit each other.
        CollectiveError: In backward, with the function's name, if that collective fails, for
            example because other ranks never reached it.

    Cost:
        Forward and backward each 2 (W - 1) / W times the tensor's bytes; sums with ``"replicated"``
        send nothing backward.

    Source:
        ``torch.distributed.nn.functional.all_reduce``, wrong for MAX, MIN and PRODUCT.

    Example:
        >>> total = all_reduce(tensor)  # doctest: +SKIP
    """
    who = members(group, grad)
    tensor = arguments.check_tensor("tensor", tensor)
    reduction = Reduction.parse(op, tensor, who.size)
    call, (tensor,) = prepare(f"all_reduce({reduction.name})", who, [tensor], anchor, check, grad=grad)
    return _reduce_for_all(tensor, call, reduction, identity)


@collective
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Reduce a tensor over all ranks to rank ``dst``; the others get zeros.

    Gradient: as for :func:`all_reduce`, with G the cotangent of ``dst``. The other ranks' outputs are
    constants.

    Args:
        tensor: Any dtype that the operation supports. Same shape and dtype on all ranks; any strides.
        dst: The destination's rank in WORLD.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.
        group_dst: The destination's rank in the group, instead of ``dst``.
        grad: Both conventions agree here: only one rank has the result.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank or the destination is not in the group, not exactly one of ``dst`` and
            ``group_dst`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        About the tensor's bytes twice forward, once backward.

    Source:
        ``torch.distributed.nn.functional.reduce``, whose gradient ignores ``op``.
    """
    who = members(group, grad)
    root = arguments.root_in_group(group, who, dst, group_dst, "dst")
    tensor = arguments.check_tensor("tensor", tensor)
    reduction = Reduction.parse(op, tensor, who.size)
    call, (tensor,) = prepare(f"reduce({reduction.name})", who, [tensor], anchor, check, terms=f" to {root}")
    if reduction.is_sum:
        summand = reduction.summand(tensor)
        return step(Map("reduce", call, root), [summand], reduction.result)

    length, is_root = tensor.numel(), who.rank == root
    outgoing = tuple(length if rank == root else 0 for rank in range(who.size))
    incoming = (length if is_root else 0,) * who.size

    def reduce_rows(rows: torch.Tensor) -> torch.Tensor:
        total = reduction.reduce(rows.view(who.size, length)) if is_root else pad(rows, length)
        return total.view(tensor.shape)

    return step(Map("exchange", call, 0, outgoing, incoming), [tensor.flatten()], reduce_rows)


@collective
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Reduce the ``r``-th tensors of all ranks' lists to rank ``r``.

    Gradient of entry s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        output: A buffer with the shape of each entry; it is filled.
        input_list: W tensors of one shape and dtype.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.
        grad: Both conventions agree here: the results differ between ranks.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: The list does not have W entries of the output's shape; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional.reduce_scatter``, whose gradient ignores ``op``.
    """
    who = members(group, grad)
    arguments.check_buffer("output", output, output)
    input_list = arguments.one_for_each("input_list", input_list, who, like=output)
    reduction = Reduction.parse(op, output, who.size)
    title = f"reduce_scatter({reduction.name})"
    call, parts = prepare(title, who, input_list, anchor, check)
    flat = [part.flatten() for part in parts]
    return _reduce_for_each(
        flat, call, reduction, lambda part: arguments.fill(output, part.view(output.shape))
    )


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
) -> torch.Tensor:
    """Reduce all ranks' tensors and give each rank its part along a dimension.

    Gradient of the part of rank s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        tensor: Same shape and dtype on all ranks.
        op: As for :func:`all_reduce`.
        dim: The dimension along which it is cut.
        sizes: Lengths of the W parts, the same on all ranks; ``None`` for equal ones.
        group: As for :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

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
    who = members(group, grad)
    tensor = arguments.check_tensor("tensor", tensor)
    dim = arguments.dimension(tensor.ndim, dim)
    lengths = arguments.split_sizes("sizes", tensor.shape[dim], sizes, who)
    reduction = Reduction.parse(op, tensor, who.size)
    title, terms = f"reduce_scatter_dim({reduction.name})", f", {dim}, {list(lengths)}"
    call, (tensor,) = prepare(title, who, [tensor], anchor, check, terms=terms)
    longest, mine = max(lengths), lengths[who.rank]
    rows = tensor.movedim(dim, 0)
    if min(lengths) < longest:
        rows = concatenate([pad(part, longest) for part in torch.split(rows, list(lengths))])
    return _reduce_for_each([rows], call, reduction, lambda part: part[:mine].movedim(0, dim))


@collective
def copy_to_group(
    tensor: torch.Tensor,
    *,
    group: GroupLike = None,
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Return a copy, whose gradient is summed over the ranks.

    For a value that is identical on all ranks and from which each rank computes its own part: the entry of a
    tensor-parallel layer. The exit of that layer is ``all_reduce(..., grad="replicated")``.

    Gradient: sum over s of g_s, on every rank.

    Args:
        tensor: The same on all ranks.
        group: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        ValueError: This rank is not in the group. Before communication.

    Cost:
        Nothing forward; backward an all-reduce.

    Source:
        Megatron-LM's ``copy_to_tensor_model_parallel_region``; ``jax.lax.pvary``.
    """
    tensor, who = arguments.check_tensor("tensor", tensor), members(group)
    # What comes back is summed as if the loss were one that all ranks compute.
    call, tensors = prepare("copy_to_group", who, [tensor], anchor, check, grad="replicated")
    return step(Map("all_reduce", call, alone=True), tensors, identity)


@collective
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Tensors:
    """Reduce several tensors over all ranks at once: :func:`all_reduce` of each.

    Gradient: as for :func:`all_reduce`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: There are no tensors, or they have several dtypes or devices; or this rank is not in the
            group.

    Cost:
        One :func:`all_reduce` of all bytes, and a copy of them.

    Source:
        ``torch.distributed._functional_collectives.all_reduce_coalesced``.
    """
    who = members(group, grad)
    tensors = arguments.one_kind("tensors", tensors)
    reduction = Reduction.parse(op, tensors[0], who.size)
    title = f"all_reduce_coalesced({reduction.name})"
    call, tensors = prepare(title, who, tensors, anchor, check, grad=grad)
    shapes = [tensor.shape for tensor in tensors]
    return _reduce_for_all(join(tensors), call, reduction, lambda flat: tuple(pieces(flat, shapes)))


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
) -> Tensors:
    """Reduce several tensors at once, a part of each for each rank: :func:`reduce_scatter_dim` of each.

    Gradient: as for :func:`reduce_scatter_dim`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        op: As for :func:`all_reduce`.
        dim: The dimension along which they are cut into W equal parts.
        group: As for :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

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
    who = members(group, grad)
    tensors = arguments.one_kind("tensors", tensors)
    reduction = Reduction.parse(op, tensors[0], who.size)
    dims = [arguments.dimension(tensor.ndim, dim) for tensor in tensors]
    for tensor, place in zip(tensors, dims, strict=True):
        arguments.split_sizes(f"dimension {place}", tensor.shape[place], None, who)
    title = f"reduce_scatter_dim_coalesced({reduction.name})"
    call, tensors = prepare(title, who, tensors, anchor, check, terms=f", {dims}")
    rows = [tensor.movedim(place, 0) for tensor, place in zip(tensors, dims, strict=True)]
    parts = torch.cat([row.reshape(who.size, row.numel() // who.size) for row in rows], 1)
    shapes = [(row.shape[0] // who.size, *row.shape[1:]) for row in rows]

    def separate(flat: torch.Tensor) -> Tensors:
        pairs = zip(pieces(flat, shapes), dims, strict=True)
        return tuple(piece.movedim(0, place) for piece, place in pairs)

    return _reduce_for_each([parts.flatten()], call, reduction, separate)


def _reduce_for_each(
    parts: Sequence[torch.Tensor], call: Call, reduction: Reduction, then: Callable[[torch.Tensor], T]
) -> T:
    """Reduce the ``r``-th of W equal parts to rank ``r``: W tensors, or parts of one along dimension 0.

    Anything but a sum is reduced at its destination, from all ranks' parts: that sends as many bytes as a
    ring, and uses torch's own gradients.
    """
    separate, size = len(parts) > 1, reduction.size
    if reduction.is_sum:
        summands = [reduction.summand(part) for part in parts]
        sums = Map("reduce_scatter", call, separate_input=separate)
        return step(sums, summands, lambda total: then(reduction.result(total)))
    length = len(parts) * parts[0].shape[0] // size
    exchange = Map("exchange", call, 0, (length,) * size, (length,) * size, separate_input=separate)

    def reduce_rows(received: torch.Tensor) -> T:
        return then(reduction.reduce(received.view(size, length, *received.shape[1:])))

    return step(exchange, parts, reduce_rows)


def _reduce_for_all(
    tensor: torch.Tensor, call: Call, reduction: Reduction, then: Callable[[torch.Tensor], T]
) -> T:
    """Reduce a tensor for all ranks."""
    if reduction.is_sum:
        summand = reduction.summand(tensor)
        return step(Map("all_reduce", call), [summand], lambda total: then(reduction.result(total)))

    def gather(part: torch.Tensor) -> T:
        whole = lambda flat: then(flat[: tensor.numel()].view(tensor.shape))  # noqa: E731
        return step(Map("all_gather", call), [part], whole)

    length = -(-tensor.numel() // reduction.size)
    return _reduce_for_each([pad(tensor.flatten(), length * reduction.size)], call, reduction, gather)
