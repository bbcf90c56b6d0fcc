"""The collectives of torch.distributed.nn.functional, with the gradient that calculus says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.arguments import (
    anchored,
    check_list,
    checked_splits,
    filled,
    is_replicated,
    root_in_group,
    shapes,
)
from dist_autograd_collectives.linear import Members, linear, members, splits_to_root, zeros_after
from dist_autograd_collectives.reductions import (
    ReduceOperation,
    is_sum,
    parse,
    reduce_stacked,
    scaled_for_sum,
)
from dist_autograd_collectives.transport import all_reduced, as_real, averaged, joined, reduce_scattered
from dist_utils import GroupLike, resolve_group
from dist_utils.process_groups import collective_device

__all__ = [
    "all_gather",
    "all_gather_base",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Convention: TypeAlias = Literal["sum", "replicated"]


def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Reduce a tensor over all ranks; every rank gets the result, as a new tensor.

    Gradient of rank r, where g_s is rank s's cotangent, G = sum over s of g_s, and W the world size:
    SUM: G. AVG: G / W. PREMUL_SUM with rank r's factor k: k G. MAX, MIN: G where x_r is the extremum, shared
    equally among the ranks that tie (or that hold a NaN), else 0. PRODUCT: G times the product of the other
    ranks' values, exact with zeros. With ``grad="replicated"`` G is g_r.

    Args:
        tensor: Any dtype the operation knows. Same shape and dtype on all ranks; any strides.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if ``tensor`` needs no gradient here. For when only some ranks'
            tensors need one: without it the others wait for this rank, which never comes.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.

    Cost:
        Forward and backward each 2 (W - 1) / W of the tensor's bytes; backward of sums with
        ``"replicated"`` nothing.

    Source:
        ``torch.distributed.nn.functional.all_reduce``, wrong for MAX, MIN and PRODUCT.

    Example:
        >>> total = all_reduce(tensor)  # doctest: +SKIP
    """
    name, factor = parse(op, tensor)
    return all_reduced(anchored(tensor, anchor), members(group), name, factor, replicated=is_replicated(grad))


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Give every rank the tensor of rank ``src``, as a new tensor.

    Gradient: sum over s of g_s at the source (its own g with ``grad="replicated"``), zeros elsewhere.

    Args:
        tensor: At the source what is sent; elsewhere something of its shape and dtype.
        src: The source's rank in WORLD.
        group: As in :func:`all_reduce`.
        group_src: The source's rank in the group, in place of ``src``.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.

    Raises:
        ValueError: This rank or the source is not in the group, not exactly one of ``src`` and
            ``group_src`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        The tensor's bytes forward; backward twice that, or nothing with ``"replicated"``.

    Source:
        ``torch.distributed.nn.functional.broadcast``; torch's functional collectives have no gradient here.
    """
    root = root_in_group(group, src, group_src, "src")
    kind = "replicated broadcast" if is_replicated(grad) else "broadcast"
    return as_real(anchored(tensor, anchor), lambda x: linear(x, kind, members(group), root=root))


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Reduce a tensor over all ranks to rank ``dst``; the others get zeros.

    Gradient: as :func:`all_reduce`, with G the cotangent of ``dst``. The other ranks' outputs are
    constants.

    Args:
        tensor: As in :func:`all_reduce`.
        dst: The destination's rank in WORLD.
        op: As in :func:`all_reduce`.
        group: As in :func:`all_reduce`.
        group_dst: The destination's rank in the group, in place of ``dst``.
        grad: Both conventions agree here: only one rank has the result.
        anchor: As in :func:`all_reduce`.

    Raises:
        TypeError: As :func:`all_reduce`.
        ValueError: As :func:`broadcast`.

    Cost:
        About the tensor's bytes twice forward, once backward.

    Source:
        ``torch.distributed.nn.functional.reduce``, whose gradient ignores ``op``.
    """
    is_replicated(grad)
    name, factor = parse(op, tensor)
    root, who = root_in_group(group, dst, group_dst, "dst"), members(group)
    tensor = anchored(tensor, anchor)
    if is_sum(name):
        scaled = scaled_for_sum(tensor, name, factor)
        total = as_real(scaled, lambda x: linear(x, "reduce", who, root=root))
        return averaged(total, who) if name == "AVG" else total
    # At the destination from all ranks' tensors.
    stacked = _to_root(tensor.flatten(), who, root)
    if who.rank == root:
        return reduce_stacked(stacked.view(who.size, *tensor.shape), name)
    return zeros_after(stacked, tensor)


def all_gather(
    tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Give every rank all ranks' tensors, in rank order.

    Gradient of rank r: sum over s of the cotangent that rank s has for entry r; with
    ``grad="replicated"`` this rank's own cotangent of its own entry.

    Args:
        tensor: Same shape and dtype on all ranks.
        group: As in :func:`all_reduce`.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.distributed.nn.functional.all_gather``.
    """
    return _all_gathered(anchored(tensor, anchor), members(group), grad).unbind(0)


def all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Gather into one tensor: :func:`all_gather` whose result has the shape of ``output_tensor``.

    Args:
        output_tensor: W times the elements of the input; filled.
        input_tensor: Same shape and dtype on all ranks.
        group: As in :func:`all_reduce`.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output_tensor``.

    Raises:
        ValueError: The output does not have W times as many elements; and as :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional._all_gather_base``, which has no backward on Gloo.
    """
    who = members(group)
    if output_tensor.numel() != who.size * input_tensor.numel():
        raise ValueError(
            f"output_tensor has {output_tensor.numel()} elements, but {who.size} ranks send "
            f"{input_tensor.numel()} each"
        )
    return filled(
        output_tensor, _all_gathered(anchored(input_tensor, anchor), who, grad).view(output_tensor.shape)
    )


def gather(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Give rank ``dst`` all ranks' tensors, in rank order; the others get zeros.

    Gradient of rank r: the cotangent that ``dst`` has for entry r.

    Args:
        tensor: Same shape and dtype on all ranks.
        dst: The destination's rank in WORLD; 0 if neither is given.
        group: As in :func:`all_reduce`.
        group_dst: The destination's rank in the group, in place of ``dst``.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.

    Raises:
        ValueError: As :func:`broadcast`.

    Source:
        ``torch.distributed.nn.functional.gather``.
    """
    is_replicated(grad)
    root, who = root_in_group(group, dst, group_dst, "dst", default=0), members(group)
    parts = _to_root(anchored(tensor, anchor).flatten(), who, root)
    if who.rank == root:
        return parts.view(who.size, *tensor.shape).unbind(0)
    return tuple(zeros_after(parts, tensor) for _ in range(who.size))


def scatter(
    tensors: Sequence[torch.Tensor] | None,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    like: torch.Tensor | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Give each rank its tensor from the list of rank ``src``.

    Gradient: at the source, entry r gets rank r's cotangent; lists of other ranks get zeros.

    Args:
        tensors: At the source W tensors of one shape and dtype. Elsewhere such a list too, or ``None``.
        src: The source's rank in WORLD; 0 if neither is given.
        group: As in :func:`all_reduce`.
        group_src: The source's rank in the group, in place of ``src``.
        like: Something of the shape and dtype that each rank gets. If it is given it must be on all
            ranks; otherwise the source sends a description first.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.

    Raises:
        ValueError: The list has not W entries of one shape and dtype, or is missing at the source; and as
            :func:`broadcast`.

    Cost:
        The list's bytes, and without ``like`` a broadcast of 144 bytes.

    Source:
        ``torch.distributed.nn.functional.scatter``, which fails on the ``None`` that it documents.
    """
    is_replicated(grad)
    root, who = root_in_group(group, src, group_src, "src", default=0), members(group)
    given = list(tensors) if tensors else []
    if given:
        check_list("tensors", given, who)
    elif who.rank == root:
        raise ValueError(f"the source needs a list of {who.size} tensors")
    if like is None:
        like = _described(given[0] if given else None, who, root, group)
    count = like.numel()
    if who.rank == root:
        sent = torch.stack(given).flatten()
    else:
        # Nothing is sent, but the list is part of the graph: its gradient is zeros, not None.
        sent = joined([entry.flatten()[:0] for entry in given or [like.detach()]])
    from_root, to_all = splits_to_root(count, who, root)  # the other way round
    received = as_real(
        anchored(sent, anchor),
        lambda x: linear(x, "exchange", who, input_splits=to_all, output_splits=from_root),
    )
    return received.view(like.shape)


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Reduce the ``r``-th tensors of all ranks' lists to rank ``r``.

    Gradient of entry s: as :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        output: Of the shape of each entry; filled.
        input_list: W tensors of one shape and dtype.
        op: As in :func:`all_reduce`.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here: the results differ between ranks.
        anchor: As in :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        TypeError: As :func:`all_reduce`.
        ValueError: The list has not W entries of the output's shape; and as :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional.reduce_scatter``, whose gradient ignores ``op``.
    """
    is_replicated(grad)
    who = members(group)
    check_list("input_list", input_list, who, like=output)
    name, factor = parse(op, output)
    return filled(
        output, reduce_scattered(anchored(torch.stack(list(input_list)), anchor), who, name, factor)
    )


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Send the ``r``-th tensor of the list to rank ``r``; the shapes may all differ.

    Gradient: the cotangents travel back the same way.

    Args:
        output_tensor_list: W tensors of the shapes that the ranks send to this one; filled.
        input_tensor_list: W tensors.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.

    Returns:
        New tensors that autograd sees, with the contents of ``output_tensor_list``.

    Raises:
        ValueError: A list has not W entries of one dtype; and as :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional.all_to_all``.
    """
    is_replicated(grad)
    who = members(group)
    for label, entries in (
        ("output_tensor_list", output_tensor_list),
        ("input_tensor_list", input_tensor_list),
    ):
        if len(entries) != who.size or len({entry.dtype for entry in entries}) != 1:
            raise ValueError(f"{label} must have {who.size} tensors of one dtype, got {shapes(entries)}")
    received = as_real(
        anchored(joined(input_tensor_list), anchor),
        lambda x: linear(
            x,
            "exchange",
            who,
            input_splits=tuple(entry.numel() for entry in input_tensor_list),
            output_splits=tuple(entry.numel() for entry in output_tensor_list),
        ),
    )
    parts: tuple[torch.Tensor, ...] = torch.split(received, [entry.numel() for entry in output_tensor_list])
    return tuple(
        filled(entry, part.view(entry.shape)) for entry, part in zip(output_tensor_list, parts, strict=True)
    )


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
) -> torch.Tensor:
    """Split a tensor along dimension 0 and send the ``r``-th part to rank ``r``.

    Gradient: the cotangents travel back the same way.

    Args:
        output: Where the received parts go, one after the other; filled.
        input: What is split.
        output_split_sizes: Lengths of the received parts; ``None`` for equal ones.
        input_split_sizes: Lengths of the sent parts; ``None`` for equal ones.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        ValueError: The split sizes are not W numbers that add up to dimension 0; and as
            :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional.all_to_all_single``.
    """
    is_replicated(grad)
    who = members(group)
    outgoing = checked_splits("input", input, input_split_sizes, who)
    incoming = checked_splits("output", output, output_split_sizes, who)
    received = as_real(
        anchored(input, anchor),
        lambda x: linear(x, "exchange", who, input_splits=outgoing, output_splits=incoming),
    )
    return filled(output, received)


def _all_gathered(tensor: torch.Tensor, who: Members, grad: Convention) -> torch.Tensor:
    kind = "replicated all_gather" if is_replicated(grad) else "all_gather"
    return as_real(tensor.unsqueeze(0), lambda x: linear(x, kind, who))


def _to_root(flat: torch.Tensor, who: Members, root: int) -> torch.Tensor:
    """Send a flat tensor to the root, which gets all ranks' one after the other; the others nothing."""
    to_root, from_all = splits_to_root(flat.numel(), who, root)
    return as_real(flat, lambda x: linear(x, "exchange", who, input_splits=to_root, output_splits=from_all))


_DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def _described(first: torch.Tensor | None, who: Members, root: int, group: GroupLike) -> torch.Tensor:
    """Return an empty stand-in for what the source will send, as the source describes it."""
    device = first.device if first is not None else collective_device(resolve_group(group))
    header = [0] * 18
    if who.rank == root and first is not None:
        header[:2] = _DTYPES.index(first.dtype), first.ndim
        header[2 : 2 + first.ndim] = first.shape
    sent = torch.tensor(header, dtype=torch.int64, device=device)
    code, ndim, *shape = linear(sent, "broadcast", who, root=root).tolist()
    return torch.empty(shape[:ndim], dtype=_DTYPES[code], device=device)
