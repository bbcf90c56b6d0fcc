"""Collectives that reduce, and ``copy_to_group``, whose gradient is a reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    check_buffer,
    filled,
    is_replicated,
    one_for_each,
    root_in_group,
)
from dist_autograd_collectives.calls import Call, members, splits_to_root
from dist_autograd_collectives.compared_calls import agree
from dist_autograd_collectives.connecting import zeros_after
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.tensor_arguments import check_tensor
from dist_autograd_collectives.transport import identity, reduced_for_all, reduced_for_each, sent
from dist_utils import GroupLike

__all__ = ["all_reduce", "copy_to_group", "reduce", "reduce_scatter"]


@collective
def all_reduce(
    tensor: torch.Tensor,
    op: ReduceOperation = ReduceOp.SUM,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Reduce a tensor over all ranks; every rank gets the result, as a new tensor.

    Gradient of rank r, where g_s is rank s's cotangent, G the sum of all g_s (g_r with
    ``grad="replicated"``), and W the world size:

    - SUM: G.
    - AVG: G / W.
    - PREMUL_SUM with rank r's factor k: k G.
    - MAX, MIN: G where x_r is the extremum, shared equally among the ranks that tie or that hold a NaN; else
      0.
    - PRODUCT: G times the product of the other ranks' values, exact with zeros.

    Args:
        tensor: Any dtype that the operation supports. Same shape and dtype on all ranks; any strides.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
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
    who, replicated = members(group), is_replicated(grad)
    check_tensor("tensor", tensor)
    reduction = Reduction.parse(op, tensor)
    tensor = anchored(tensor, anchor)
    title = f"all_reduce({reduction.name})"
    agree(check, who, f"{title}, {grad}", [tensor])
    return reduced_for_all(tensor, who, reduction, title, identity, replicated=replicated)


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
) -> Step[torch.Tensor]:
    """Reduce a tensor over all ranks to rank ``dst``; the others get zeros.

    Gradient: as for :func:`all_reduce`, with G the cotangent of ``dst``. The other ranks' outputs are
    constants.

    Args:
        tensor: Any dtype that the operation supports. Same shape and dtype on all ranks; any strides.
        dst: The destination's rank in WORLD.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        group_dst: The destination's rank in the group, instead of ``dst``.
        grad: Both conventions agree here: only one rank has the result.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank or the destination is not in the group, not exactly one of ``dst`` and
            ``group_dst`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        About the tensor's bytes twice forward, once backward.

    Source:
        ``torch.distributed.nn.functional.reduce``, whose gradient ignores ``op``.
    """
    is_replicated(grad)
    who = members(group)
    root = root_in_group(group, who, dst, group_dst, "dst")
    check_tensor("tensor", tensor)
    reduction = Reduction.parse(op, tensor)
    tensor = anchored(tensor, anchor)
    title = f"reduce({reduction.name})"
    agree(check, who, f"{title} to {root}", [tensor])
    if reduction.is_sum:
        return sent(
            [reduction.scaled(tensor, who.size)],
            Call("reduce", who, title, root),
            lambda total: reduction.finished(total, who.size, tensor.dtype),
        )

    def reduced(stacked: torch.Tensor) -> torch.Tensor:
        if who.rank == root:
            return reduction.reduced(stacked)
        return zeros_after(stacked, tensor)

    to_root, from_all = splits_to_root(1, who, root)
    return sent([tensor.unsqueeze(0)], Call("gather", who, title, root, to_root, from_all), reduced)


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
) -> Step[torch.Tensor]:
    """Reduce the ``r``-th tensors of all ranks' lists to rank ``r``.

    Gradient of entry s: as for :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        output: A buffer with the shape of each entry; it is filled.
        input_list: W tensors of one shape and dtype.
        op: A ``ReduceOp`` or its name, as in ``"max"``.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here: the results differ between ranks.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: The list does not have W entries of the output's shape; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional.reduce_scatter``, whose gradient ignores ``op``.
    """
    is_replicated(grad)
    who = members(group)
    check_buffer("output", output, output)
    input_list = one_for_each("input_list", input_list, who, like=output)
    reduction = Reduction.parse(op, output)
    parts = [anchored(entry, anchor) for entry in input_list]
    title = f"reduce_scatter({reduction.name})"
    agree(check, who, title, parts)
    return reduced_for_each(parts, who, reduction, title, lambda part: filled(output, part))


@collective
def copy_to_group(
    tensor: torch.Tensor,
    *,
    group: GroupLike = None,
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Return a copy, whose gradient is summed over the ranks.

    For a value that is identical on all ranks and from which each rank computes its own part: the entry of a
    tensor-parallel layer. The exit of that layer is ``all_reduce(..., grad="replicated")``.

    Gradient: sum over s of g_s, on every rank.

    Args:
        tensor: The same on all ranks.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.

    Cost:
        Nothing forward; backward an all-reduce.

    Source:
        Megatron-LM's ``copy_to_tensor_model_parallel_region``; ``jax.lax.pvary``.
    """
    who = members(group)
    check_tensor("tensor", tensor)
    tensor = anchored(tensor, anchor)
    agree(check, who, "copy_to_group", [tensor])
    return sent([tensor], Call("copy", who, "copy_to_group"), identity)
