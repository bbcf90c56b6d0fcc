"""The collectives of torch.distributed.nn.functional, with the gradient that calculus says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ReduceOp

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    check_buffer,
    check_own_part,
    checked_sizes,
    filled,
    is_replicated,
    kind_of,
    one_for_each,
    one_kind,
    root_in_group,
    shapes,
)
from dist_autograd_collectives.calls import Call, Members, members, splits_to_root
from dist_autograd_collectives.compared_calls import agree, agree_on_splits
from dist_autograd_collectives.connecting import zeros_after
from dist_autograd_collectives.descriptions import describe, described
from dist_autograd_collectives.reductions import ReduceOperation, Reduction
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.tensor_arguments import check_tensor
from dist_autograd_collectives.transport import all_of_them, itself, reduced_for_all, reduced_for_each, sent
from dist_utils import GroupLike

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
        check: Compare first what the ranks call and with what: one all-gather of 33 bytes. ``None`` for
            what the environment variable ``DIST_AUTOGRAD_CHECK`` says (``1`` for yes). Nothing is compared
            while ``torch.compile`` traces.

    Raises:
        TypeError: ``op`` is unknown, or has no meaning for the dtype. Before communication.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.
        TensorMismatchError: With ``check``: on every rank, if the ranks' calls do not fit each other.
        CollectiveError: In backward, with the function's name, if that collective fails: other ranks never
            came to it, say.

    Cost:
        Forward and backward each 2 (W - 1) / W of the tensor's bytes; backward of sums with
        ``"replicated"`` nothing.

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
    return reduced_for_all(tensor, who, reduction, title, itself, replicated=replicated)


@collective
def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Give every rank the tensor of rank ``src``, as a new tensor.

    Gradient: sum over s of g_s at the source (its own g with ``grad="replicated"``), zeros elsewhere.

    Args:
        tensor: At the source what is sent; elsewhere something of its shape and dtype.
        src: The source's rank in WORLD.
        group: As in :func:`all_reduce`.
        group_src: The source's rank in the group, in place of ``src``.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Raises:
        ValueError: This rank or the source is not in the group, not exactly one of ``src`` and
            ``group_src`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        The tensor's bytes forward; backward twice that, or nothing with ``"replicated"``.

    Source:
        ``torch.distributed.nn.functional.broadcast``; torch's functional collectives have no gradient here.
    """
    who = members(group)
    root = root_in_group(group, who, src, group_src, "src")
    check_tensor("tensor", tensor)
    kind = kind_of("broadcast", grad)
    tensor = anchored(tensor, anchor)
    agree(check, who, f"broadcast from {root}, {grad}", [tensor])
    return sent([tensor], Call(kind, who, "broadcast", root), itself)


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
        check: As in :func:`all_reduce`.

    Raises:
        TypeError: As :func:`all_reduce`.
        ValueError: As :func:`broadcast`.

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
def all_gather(
    tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[tuple[torch.Tensor, ...]]:
    """Give every rank all ranks' tensors, in rank order.

    Gradient of rank r: sum over s of the cotangent that rank s has for entry r; with
    ``grad="replicated"`` this rank's own cotangent of its own entry.

    Args:
        tensor: Same shape and dtype on all ranks.
        group: As in :func:`all_reduce`.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.distributed.nn.functional.all_gather``.
    """
    who = members(group)
    check_tensor("tensor", tensor)
    tensor = anchored(tensor, anchor)
    agree(check, who, f"all_gather, {grad}", [tensor])
    kind = kind_of("all_gather", grad)
    return sent([tensor], Call(kind, who, "all_gather", separate_output=True), all_of_them)


@collective
def all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Gather into one tensor: :func:`all_gather` whose result has the shape of ``output_tensor``.

    Args:
        output_tensor: W times the elements of the input; filled.
        input_tensor: Same shape and dtype on all ranks.
        group: As in :func:`all_reduce`.
        grad: As in :func:`all_reduce`.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output_tensor``.

    Raises:
        ValueError: The output does not have W times as many elements; and as :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional._all_gather_base``, which has no backward on Gloo.
    """
    who = members(group)
    check_tensor("input_tensor", input_tensor)
    check_buffer("output_tensor", output_tensor, input_tensor)
    if output_tensor.numel() != who.size * input_tensor.numel():
        raise ValueError(
            f"output_tensor has {output_tensor.numel()} elements, but {who.size} ranks send "
            f"{input_tensor.numel()} each"
        )
    tensor = anchored(input_tensor, anchor)
    agree(check, who, f"all_gather_base, {grad}", [tensor])
    kind = kind_of("all_gather", grad)
    return sent(
        [tensor.flatten()],
        Call(kind, who, "all_gather_base"),
        lambda flat: filled(output_tensor, flat.view(output_tensor.shape)),
    )


@collective
def gather(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: GroupLike = None,
    *,
    group_dst: int | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[tuple[torch.Tensor, ...]]:
    """Give rank ``dst`` all ranks' tensors, in rank order; the others get zeros.

    Gradient of rank r: the cotangent that ``dst`` has for entry r.

    Args:
        tensor: Same shape and dtype on all ranks.
        dst: The destination's rank in WORLD; 0 if neither is given.
        group: As in :func:`all_reduce`.
        group_dst: The destination's rank in the group, in place of ``dst``.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Raises:
        ValueError: As :func:`broadcast`.

    Source:
        ``torch.distributed.nn.functional.gather``.
    """
    is_replicated(grad)
    who = members(group)
    root = root_in_group(group, who, dst, group_dst, "dst", default=0)
    check_tensor("tensor", tensor)
    tensor = anchored(tensor, anchor)
    agree(check, who, f"gather to {root}", [tensor])
    return sent([tensor], Call("gather", who, "gather", root, separate_output=True), all_of_them)


@collective
def scatter(
    tensors: Sequence[torch.Tensor] | None,
    src: int | None = None,
    group: GroupLike = None,
    *,
    group_src: int | None = None,
    like: torch.Tensor | None = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Give each rank its tensor from the list of rank ``src``.

    Gradient: at the source, entry r gets rank r's cotangent; lists of other ranks get zeros.

    Args:
        tensors: At the source W tensors of one shape and dtype. Elsewhere such a list too, or ``None``.
        src: The source's rank in WORLD; 0 if neither is given.
        group: As in :func:`all_reduce`.
        group_src: The source's rank in the group, in place of ``src``.
        like: Something of the shape and dtype that each rank gets. If it is given it must be on all
            ranks; otherwise the source sends a description first (``torch.compile`` cannot trace that: there
            every rank needs a list or ``like``).
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Raises:
        ValueError: The list has not W entries of one shape and dtype, or is missing at the source; and as
            :func:`broadcast`.

    Cost:
        The list's bytes, and without ``like`` 256 bytes more for each rank.

    Source:
        ``torch.distributed.nn.functional.scatter``, which fails on the ``None`` that it documents.
    """
    is_replicated(grad)
    who = members(group)
    root = root_in_group(group, who, src, group_src, "src", default=0)
    described_by_source = like is None and not torch.compiler.is_compiling()
    given = _entries_of_scatter(tensors, like, who, root)
    parts = [anchored(entry, anchor) for entry in given]
    header = described(given[0] if given and who.rank == root else None, who) if described_by_source else None
    # Before the description, which a rank that has no like= waits for, and others do not send.
    agree(check, who, f"scatter from {root}{'' if described_by_source else ' with like='}", [])
    description = None
    if header is not None:
        description = describe(header, who, root)
        like = given[0] if given else description.wait()
    elif like is None:  # shapes that only another rank knows cannot be traced
        if not given:
            raise ValueError("under torch.compile every rank needs a list of tensors, or like=")
        like = given[0]
    # Lists of other ranks are part of the graph: their gradients are zeros, not None.
    parts = parts or [anchored(like.new_empty(0, *like.shape), anchor)]
    agree(check, who, f"scatter from {root} of {like.dtype} {tuple(like.shape)}", [parts[0].flatten()[:0]])
    if given:

        def after_description(part: torch.Tensor) -> torch.Tensor:
            if description is not None:  # for ranks without a list
                description.wait()
            return part

        return sent(parts, Call("scatter", who, "scatter", root, separate_input=True), after_description)
    from_root, nothing = splits_to_root(1, who, root)  # the other way round, and not at the root
    call = Call("scatter", who, "scatter", root, input_splits=nothing, output_splits=from_root)
    return sent(parts, call, lambda row: row.squeeze(0))


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

    Gradient of entry s: as :func:`all_reduce`, with G the cotangent of rank s.

    Args:
        output: Of the shape of each entry; filled.
        input_list: W tensors of one shape and dtype.
        op: As in :func:`all_reduce`.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here: the results differ between ranks.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

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
    check_buffer("output", output, output)
    input_list = one_for_each("input_list", input_list, who, like=output)
    reduction = Reduction.parse(op, output)
    parts = [anchored(entry, anchor) for entry in input_list]
    title = f"reduce_scatter({reduction.name})"
    agree(check, who, title, parts)
    return reduced_for_each(parts, who, reduction, title, lambda part: filled(output, part))


@collective
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[tuple[torch.Tensor, ...]]:
    """Send the ``r``-th tensor of the list to rank ``r``; the shapes may all differ.

    Gradient: the cotangents travel back the same way.

    Args:
        output_tensor_list: W tensors of the shapes that the ranks send to this one; filled.
        input_tensor_list: W tensors.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

    Returns:
        New tensors that autograd sees, with the contents of ``output_tensor_list``.

    Raises:
        ValueError: A list has not W entries of one dtype; and as :func:`all_reduce`.

    Source:
        ``torch.distributed.nn.functional.all_to_all``.
    """
    is_replicated(grad)
    who = members(group)
    output_tensor_list = one_kind("output_tensor_list", output_tensor_list)
    input_tensor_list = one_kind("input_tensor_list", input_tensor_list)
    for label, entries in (
        ("output_tensor_list", output_tensor_list),
        ("input_tensor_list", input_tensor_list),
    ):
        if len(entries) != who.size:
            raise ValueError(f"{label} must have {who.size} tensors, got {shapes(entries)}")
    for entry in output_tensor_list:
        check_buffer("output_tensor_list", entry, input_tensor_list[0])
    outgoing = tuple(entry.numel() for entry in input_tensor_list)
    incoming = tuple(entry.numel() for entry in output_tensor_list)
    check_own_part(outgoing, incoming, who)
    flat = [anchored(entry.flatten(), anchor) for entry in input_tensor_list]
    agree(check, who, "all_to_all", [entry[:0] for entry in flat])
    agree_on_splits(check, who, outgoing, incoming)

    def unflattened(*parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pairs = zip(output_tensor_list, parts, strict=True)
        return tuple(filled(entry, part.view(entry.shape)) for entry, part in pairs)

    call = Call(
        "exchange",
        who,
        "all_to_all",
        input_splits=outgoing,
        output_splits=incoming,
        separate_input=True,
        separate_output=True,
    )
    return sent(flat, call, unflattened)


@collective
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Split a tensor along dimension 0 and send the ``r``-th part to rank ``r``.

    Gradient: the cotangents travel back the same way.

    Args:
        output: Where the received parts go, one after the other; filled.
        input: What is split.
        output_split_sizes: Lengths of the received parts; ``None``, on all ranks, for equal ones.
        input_split_sizes: Lengths of the sent parts; likewise.
        group: As in :func:`all_reduce`.
        grad: Both conventions agree here.
        anchor: As in :func:`all_reduce`.
        check: As in :func:`all_reduce`.

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
    for label, buffer in (("input", input), ("output", output)):
        check_tensor(label, buffer)
        if not buffer.ndim:
            raise ValueError(f"{label} has no dimension to split")
    check_buffer("output", output, input)
    if output.shape[1:] != input.shape[1:]:
        raise ValueError(f"output of shape {tuple(output.shape)} does not take rows of {tuple(input.shape)}")
    outgoing = checked_sizes("input_split_sizes", input.shape[0], input_split_sizes, who)
    incoming = checked_sizes("output_split_sizes", output.shape[0], output_split_sizes, who)
    check_own_part(outgoing, incoming, who)
    tensor = anchored(input, anchor)
    agree(check, who, "all_to_all_single", [tensor[:0]])
    agree_on_splits(check, who, outgoing, incoming)
    if input_split_sizes is not None or output_split_sizes is not None:
        call = Call("exchange", who, "all_to_all_single", 0, outgoing, incoming)
    else:
        call = Call("exchange", who, "all_to_all_single")
    return sent([tensor], call, lambda received: filled(output, received))


def _entries_of_scatter(
    tensors: Sequence[torch.Tensor] | None, like: torch.Tensor | None, who: Members, root: int
) -> list[torch.Tensor]:
    """Return the list to scatter, empty where none is needed; raises if it does not fit."""
    if like is not None:
        check_tensor("like", like)
    if tensors is not None:
        return one_for_each("tensors", tensors, who, like=like)
    if who.rank == root:
        raise ValueError(f"the source needs a list of {who.size} tensors")
    return []
