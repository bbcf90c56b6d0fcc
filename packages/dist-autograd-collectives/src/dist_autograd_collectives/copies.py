"""Collectives that copy tensors between ranks: from all, from one, or to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dist_autograd_collectives import arguments, maps
from dist_autograd_collectives.arguments import Sizes
from dist_autograd_collectives.collective import Plan, collective
from dist_autograd_collectives.maps import Convention, Parts, Tensors, members
from dist_utils import GroupLike


@collective
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    grad: Convention = "sum",
) -> Plan[torch.Tensor]:
    """Give every rank the tensor of rank ``src``, as a new tensor.

    Gradient: sum over s of g_s at the source (its own g with ``grad="replicated"``), zeros elsewhere.

    Args:
        tensor: At the source the tensor to send; elsewhere any tensor of its shape and dtype.
        src: The source's rank in WORLD.
        group: As for :func:`all_reduce`.
        group_src: The source's rank in the group, instead of ``src``.
        grad: As for :func:`all_reduce`.

    Raises:
        ValueError: This rank or the source is not in the group, not exactly one of ``src`` and
            ``group_src`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        The tensor's bytes forward; twice that backward, or nothing with ``"replicated"``.

    Source:
        ``torch.distributed.nn.functional.broadcast``; torch's functional collectives have no gradient here.
    """
    who, shape = members(group), tensor.shape
    root = arguments.root_in_group(who, src, group_src, "src")
    plan: Plan[Any] = Plan("broadcast", who, [tensor], f" from {root}", grad=grad)
    plan.map("broadcast", maps.as_rows, *who.from_root(root, shape))
    return plan.returning(lambda received: maps.of_shape(received[0], shape))


@collective
def all_gather(tensor: torch.Tensor, group: GroupLike = None, *, grad: Convention = "sum") -> Plan[Tensors]:
    """Give every rank all ranks' tensors, in rank order.

    Gradient of rank r: sum over s of the cotangent that rank s has for entry r; with
    ``grad="replicated"`` this rank's own cotangent of its own entry.

    Args:
        tensor: Same shape and dtype on all ranks.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.distributed.nn.functional.all_gather``.
    """
    who, shape = members(group), tensor.shape
    plan: Plan[Any] = Plan("all_gather", who, [tensor], grad=grad)
    plan.map("all_gather", maps.as_rows, Parts(), Parts((maps.count(shape),) * who.size, separate=True))
    return plan.returning(lambda received: tuple([maps.of_shape(part, shape) for part in received]))


@collective
def all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
) -> Plan[torch.Tensor]:
    """Gather into one tensor: :func:`all_gather` whose result has the shape of ``output_tensor``.

    Args:
        output_tensor: W times the elements of the input; filled.
        input_tensor: Same shape and dtype on all ranks.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output_tensor``.

    Raises:
        ValueError: The output does not have W times as many elements; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional._all_gather_base``, which has no backward on Gloo.
    """
    who, shape = members(group), output_tensor.shape
    arguments.check_alike("output_tensor and input_tensor", [output_tensor, input_tensor], 2, shapes=False)
    if output_tensor.numel() != who.size * input_tensor.numel():
        raise ValueError(
            f"output_tensor has {output_tensor.numel()} elements, but {who.size} ranks send "
            f"{input_tensor.numel()} each"
        )
    plan: Plan[Any] = Plan("all_gather_base", who, [input_tensor], grad=grad)
    plan.map("all_gather", maps.as_rows, Parts(), Parts((maps.count(input_tensor.shape),) * who.size))
    return plan.returning(lambda received: maps.of_shape(received[0], shape))


@collective
def gather(
    tensor: torch.Tensor, dst: int | None = None, group: GroupLike = None, *, group_dst: int | None = None
) -> Plan[Tensors]:
    """Give rank ``dst`` all ranks' tensors, in rank order; the others get zeros.

    Gradient of rank r: the cotangent that ``dst`` has for entry r.

    Args:
        tensor: Same shape and dtype on all ranks.
        dst: The destination's rank in WORLD; 0 if neither is given.
        group: As for :func:`all_reduce`.
        group_dst: The destination's rank in the group, instead of ``dst``.

    Raises:
        ValueError: This rank or the destination is not in the group, or both ``dst`` and ``group_dst`` are
            given. Before communication.

    Source:
        ``torch.distributed.nn.functional.gather``.
    """
    who, shape = members(group), tensor.shape
    dst = 0 if dst is None and group_dst is None else dst
    root = arguments.root_in_group(who, dst, group_dst, "dst")
    plan: Plan[Any] = Plan("gather", who, [tensor], f" to {root}")
    received, sent, rows = who.from_root(root, shape)  # the other way round
    plan.map("exchange", maps.as_rows, sent, Parts(received.lengths, separate=True), rows)
    return plan.returning(lambda received: tuple([maps.of_shape(part, shape) for part in received]))


@collective
def scatter(
    tensors: Sequence[torch.Tensor] | None,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    like: torch.Tensor | None = None,
) -> Plan[torch.Tensor]:
    """Give each rank its tensor from the list of rank ``src``.

    Gradient: at the source, entry r gets rank r's cotangent; lists of other ranks get zeros.

    Args:
        tensors: At the source W tensors of one shape and dtype. Elsewhere such a list, too, or ``None``.
        src: The source's rank in WORLD; 0 if neither is given.
        group: As for :func:`all_reduce`.
        group_src: The source's rank in the group, instead of ``src``.
        like: A tensor with the shape and dtype that this rank gets; needed where ``tensors`` is ``None``. If
            it needs a gradient, it gets zeros: see :func:`anchored`.

    Raises:
        ValueError: The list does not have W entries of one shape and dtype, or is missing at the source, or
            elsewhere without ``like``; and as for :func:`broadcast`.

    Cost:
        The list's bytes.

    Source:
        ``torch.distributed.nn.functional.scatter``, which fails on the ``None`` that it documents.
    """
    who, count = members(group), 0 if tensors is None else len(tensors)
    src = 0 if src is None and group_src is None else src
    root = arguments.root_in_group(who, src, group_src, "src")
    if tensors is not None:
        arguments.check_alike("tensors", tensors, who.size)
        like = tensors[0] if like is None else like
        arguments.check_alike("tensors[0] and like", [tensors[0], like], 2)
    elif like is None or who.rank == root:
        raise ValueError(f"the source needs a list of {who.size} tensors, other ranks a list or like=")
    shape = like.shape
    plan: Plan[Any] = Plan("scatter", who, [like], f" from {root}")
    # What a receiver gives is part of the graph, too; without a list that is all that is given.
    own = lambda given: maps.as_rows(given[: count or 1])  # noqa: E731
    sent, received, rows = who.from_root(root, shape)
    plan.map("exchange", own, Parts(sent.lengths, separate=count > 0), received, rows)
    return plan.returning(lambda received: maps.of_shape(received[0], shape))


@collective
def all_gather_cat(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    sizes: Sizes = None,
    group: GroupLike = None,
    grad: Convention = "sum",
) -> Plan[torch.Tensor]:
    """Give every rank all ranks' tensors, concatenated along a dimension in rank order.

    Gradient of rank r: its own part of the sum of all ranks' cotangents; with ``grad="replicated"`` of this
    rank's cotangent.

    Args:
        tensor: One dimension or more. Same dtype and, except along ``dim``, same shape on all ranks.
        dim: The dimension along which they are concatenated.
        sizes: Lengths of all ranks' tensors along ``dim``: ``None`` if they are equal, a list of W numbers if
            they are known, ``"auto"`` to ask the other ranks.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Returns:
        A tensor whose length along ``dim`` is the sum of all ranks'.

    Raises:
        IndexError: There is no such dimension.
        ValueError: ``sizes`` are not W numbers, or wrong for this rank's tensor; or this rank is not
            in the group.

    Cost:
        The bytes of the other ranks' tensors, forward and backward; with ``"replicated"`` nothing backward.
        ``"auto"`` adds an all-gather of one number, which the host waits for.

    Source:
        ``torch.distributed._functional_collectives.all_gather_tensor``, which supports equal sizes only.

    Example:
        >>> tokens = all_gather_cat(mine, dim=1, sizes="auto")  # doctest: +SKIP
    """
    who, dim = members(group), arguments.dimension(tensor.ndim, dim)
    own = tensor.shape[dim]
    lengths = arguments.known_sizes("sizes", own, sizes, who)
    terms = f", {dim}, {sizes if sizes is None or lengths is None else list(lengths)}"
    uneven_dim = None if sizes is None else dim
    plan: Plan[Any] = Plan("all_gather_cat", who, [tensor], terms, grad=grad, uneven_dim=uneven_dim)
    if lengths is None:
        return plan.asking("sizes", [own] * who.size)
    plan.map("all_gather", lambda given: (given[0].movedim(dim, 0),), Parts(), Parts(lengths))
    return plan.returning(lambda received: received[0].movedim(0, dim))


@collective
def all_gather_stack(
    tensor: torch.Tensor, dim: int = 0, *, group: GroupLike = None, grad: Convention = "sum"
) -> Plan[torch.Tensor]:
    """Give every rank all ranks' tensors, stacked along a new dimension in rank order.

    Gradient of rank r: its own entry of the sum of all ranks' cotangents; with ``grad="replicated"`` of this
    rank's cotangent.

    Args:
        tensor: Same shape and dtype on all ranks; may have no dimension.
        dim: The new dimension's position in the result; its length is W.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Raises:
        IndexError: The result has no such dimension.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.stack`` of ``torch.distributed.nn.functional.all_gather``, with one copy less.
    """
    who, dim = members(group), arguments.dimension(tensor.ndim + 1, dim)
    plan: Plan[Any] = Plan("all_gather_stack", who, [tensor], f", {dim}", grad=grad)
    plan.map("all_gather", lambda given: (given[0].unsqueeze(0),), Parts(), Parts((1,) * who.size))
    return plan.returning(lambda received: received[0].movedim(0, dim))
