"""Collectives that reduce, and ``copy_to_group``, whose gradient is a reduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives import arguments, maps
from dist_autograd_collectives.collective import Compute, Plan, as_given, collective, first
from dist_autograd_collectives.maps import Convention, Kind, Parts, Tensors, members
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_utils import GroupLike


@collective
def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
) -> Plan[torch.Tensor]:
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
        grad: What the ranks do next with the result: ``"sum"`` for different work, where the total loss is
            the sum of the ranks' losses, or ``"replicated"`` for the same work, whose one loss counts once.
            Under DDP always ``"sum"``.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.
        TensorMismatchError: In :func:`compare_calls`: on every rank, if the ranks' calls differ.
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
    who, shape = members(group), tensor.shape
    reduction = Reduction.parse(op, tensor.dtype, who.size)
    plan: Plan[Any] = Plan(f"all_reduce({reduction.name})", who, [tensor], grad=grad)
    return plan.returning(_reduce_for_all(plan, reduction, first, shape))


@collective
def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
) -> Plan[torch.Tensor]:
    """Reduce a tensor over all ranks to rank ``dst``; the others get zeros.

    Gradient: as for :func:`all_reduce`, with G the cotangent of ``dst``. The other ranks' outputs are
    constants.

    Args:
        tensor: Any dtype that the operation supports. Same shape and dtype on all ranks; any strides.
        dst: The destination's rank in WORLD.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.
        group_dst: The destination's rank in the group, instead of ``dst``.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank or the destination is not in the group, or not exactly one of ``dst`` and
            ``group_dst`` is given. Before communication.

    Cost:
        About the tensor's bytes twice forward, once backward.

    Source:
        ``torch.distributed.nn.functional.reduce``, whose gradient ignores ``op``.
    """
    who, shape = members(group), tensor.shape
    root = arguments.root_in_group(who, dst, group_dst, "dst")
    reduction = Reduction.parse(op, tensor.dtype, who.size)
    plan: Plan[Any] = Plan(f"reduce({reduction.name})", who, [tensor], f" to {root}")
    sent = who.only(root, maps.count(shape))
    reduce_part = _reduce_for_each(plan, reduction, maps.as_rows, sent, root=root)
    return plan.returning(lambda received: maps.of_shape(reduce_part(received), shape))


@collective
def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
) -> Plan[torch.Tensor]:
    """Reduce the ``r``-th tensors of all ranks' lists to rank ``r``.

    Gradient of entry s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        output: A buffer with the shape of each entry; it is filled.
        input_list: W tensors of one shape and dtype.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: The list does not have W entries of the output's shape; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional.reduce_scatter``, whose gradient ignores ``op``.
    """
    who, shape = members(group), output.shape
    arguments.check_alike("input_list and output", [*input_list, output], who.size + 1)
    reduction = Reduction.parse(op, output.dtype, who.size)
    plan: Plan[Any] = Plan(f"reduce_scatter({reduction.name})", who, input_list)
    sent = Parts((maps.count(shape),) * who.size, separate=True)
    reduce_part = _reduce_for_each(plan, reduction, maps.as_rows, sent)
    return plan.returning(lambda received: maps.of_shape(reduce_part(received), shape))


@collective
def reduce_scatter_dim(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    dim: int = 0,
    *,
    sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Plan[torch.Tensor]:
    """Reduce all ranks' tensors and give each rank its part along a dimension.

    Gradient of the part of rank s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        tensor: Same shape and dtype on all ranks.
        op: As for :func:`all_reduce`.
        dim: The dimension along which it is cut.
        sizes: Lengths of the W parts, the same on all ranks; ``None`` for equal ones.
        group: As for :func:`all_reduce`.

    Returns:
        This rank's part, whose length along ``dim`` is ``sizes[rank]``.

    Raises:
        IndexError: There is no such dimension.
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: ``sizes`` do not add up to the length, or it cannot be divided by W; or this rank is not
            in the group.

    Cost:
        The bytes of the other ranks' parts, forward and backward.

    Source:
        ``torch.distributed._functional_collectives.reduce_scatter_tensor``, whose gradient covers SUM only.
    """
    who, dim = members(group), arguments.dimension(tensor.ndim, dim)
    lengths = arguments.split_sizes("sizes", tensor.shape[dim], sizes, who)
    reduction = Reduction.parse(op, tensor.dtype, who.size)
    terms = f", {dim}, {list(lengths)}"
    plan: Plan[Any] = Plan(f"reduce_scatter_dim({reduction.name})", who, [tensor], terms)
    reduce_part = _reduce_for_each(plan, reduction, lambda given: (given[0].movedim(dim, 0),), Parts(lengths))
    return plan.returning(lambda received: reduce_part(received).movedim(0, dim))


@collective
def copy_to_group(tensor: torch.Tensor, *, group: GroupLike = None) -> Plan[torch.Tensor]:
    """Return a copy, whose gradient is summed over the ranks.

    For a value that is identical on all ranks and from which each rank computes its own part: the entry of a
    tensor-parallel layer. The exit of that layer is ``all_reduce(..., grad="replicated")``.

    Gradient: sum over s of g_s, on every rank.

    Args:
        tensor: The same on all ranks.
        group: As for :func:`all_reduce`.

    Raises:
        ValueError: This rank is not in the group. Before communication.

    Cost:
        Nothing forward; backward an all-reduce.

    Source:
        Megatron-LM's ``copy_to_tensor_model_parallel_region``; ``jax.lax.pvary``.
    """
    plan: Plan[Any] = Plan("copy_to_group", members(group), [tensor])
    plan.map("copy", as_given)
    return plan.returning(first)


@collective
def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: ReduceOperation = ReduceOp.SUM,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
) -> Plan[Tensors]:
    """Reduce several tensors over all ranks at once: :func:`all_reduce` of each.

    Gradient: as for :func:`all_reduce`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        op: As for :func:`all_reduce`.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: There are no tensors, or they have several dtypes or devices; or this rank is not in the
            group.

    Cost:
        One :func:`all_reduce` of all bytes, and a copy of them.

    Source:
        ``torch.distributed._functional_collectives.all_reduce_coalesced``.
    """
    who, shapes = members(group), [tensor.shape for tensor in tensors]
    arguments.check_alike("tensors", tensors, max(1, len(tensors)), shapes=False)
    reduction = Reduction.parse(op, tensors[0].dtype, who.size)
    plan: Plan[Any] = Plan(f"all_reduce_coalesced({reduction.name})", who, tensors, grad=grad)
    flat = lambda given: maps.concatenate(maps.flatten_each(given))  # noqa: E731
    reduce_all = _reduce_for_all(plan, reduction, flat, [sum(map(math.prod, shapes))])
    return plan.returning(lambda received: maps.views_of_shapes(reduce_all(received), shapes))


def _reduce_for_each(
    plan: Plan[Any], reduction: Reduction, parts: Compute, sent: Parts, *, root: int | None = None
) -> Callable[[Tensors], torch.Tensor]:
    """Append what reduces the ``r``-th of W parts to rank ``r``.

    Anything but a sum is reduced at its destination, from all ranks' parts: that sends as many bytes as a
    ring, and uses torch's own gradients.

    Args:
        plan: The plan.
        reduction: The operation.
        parts: Makes the parts of what the caller gave.
        sent: Them.
        root: The only rank with a part, if there is one; the others get zeros.

    Returns:
        What makes this rank's part of what it receives.
    """
    size, mine = reduction.size, sent.lengths[plan.who.rank]
    kind: Kind = "reduce_scatter" if root is None else "reduce"
    sides = sent, Parts((mine,) * size), 0 if root is None else sent.lengths[root]
    if reduction.is_sum:
        summands: Compute = lambda given: tuple([reduction.summand(part) for part in parts(given)])  # noqa: E731
        plan.map(kind, summands, *sides)
        return lambda received: reduction.result(received[0])
    plan.map("exchange", parts, *sides)
    if not mine:
        return first
    return lambda received: reduction.reduce(received[0].view(size, mine, *received[0].shape[1:]))


def _reduce_for_all(
    plan: Plan[Any], reduction: Reduction, join: Callable[[Tensors], torch.Tensor], shape: Sequence[int]
) -> Callable[[Tensors], torch.Tensor]:
    """Append what reduces a tensor for all ranks.

    Args:
        plan: The plan.
        reduction: The operation.
        join: Makes the tensor of what the caller gave.
        shape: Its shape.

    Returns:
        What makes the reduced tensor of what this rank receives.
    """
    if reduction.is_sum:
        plan.map("all_reduce", lambda given: (reduction.summand(join(given)),))
        return lambda received: reduction.result(received[0])
    count, size = math.prod(shape), reduction.size
    each = Parts(tuple([(count + rank) // size for rank in range(size)]))
    reduce_part = _reduce_for_each(plan, reduction, lambda given: (join(given).flatten(),), each)
    plan.map("all_gather", lambda received: (reduce_part(received),), Parts(), each)
    return lambda received: received[0].view(shape)
