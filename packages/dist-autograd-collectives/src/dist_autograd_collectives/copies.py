"""Collectives that copy tensors between ranks: from all, from one, or to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    check_buffer,
    filled,
    is_replicated,
    kind_of,
    one_for_each,
    root_in_group,
)
from dist_autograd_collectives.calls import Call, Members, members, splits_to_root
from dist_autograd_collectives.compared_calls import agree
from dist_autograd_collectives.descriptions import describe, described, stand_in
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.tensor_arguments import check_tensor
from dist_autograd_collectives.transport import as_tuple, identity, sent
from dist_utils import GroupLike

__all__ = ["all_gather", "all_gather_base", "broadcast", "gather", "scatter"]


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
        tensor: At the source the tensor to send; elsewhere any tensor of its shape and dtype.
        src: The source's rank in WORLD.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        group_src: The source's rank in the group, instead of ``src``.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        ValueError: This rank or the source is not in the group, not exactly one of ``src`` and
            ``group_src`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        The tensor's bytes forward; twice that backward, or nothing with ``"replicated"``.

    Source:
        ``torch.distributed.nn.functional.broadcast``; torch's functional collectives have no gradient here.
    """
    who = members(group)
    root = root_in_group(group, who, src, group_src, "src")
    check_tensor("tensor", tensor)
    kind = kind_of("broadcast", grad)
    tensor = anchored(tensor, anchor)
    agree(check, who, f"broadcast from {root}, {grad}", [tensor])
    return sent([tensor], Call(kind, who, "broadcast", root), identity)


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
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

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
    return sent([tensor], Call(kind, who, "all_gather", separate_output=True), as_tuple)


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
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: ``"sum"`` if the total loss is the sum of the ranks' losses, ``"replicated"`` if every rank
            computes the same loss and that is counted once.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        A new tensor that autograd sees, with the contents of ``output_tensor``.

    Raises:
        ValueError: The output does not have W times as many elements; or this rank is not in the group.

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
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        group_dst: The destination's rank in the group, instead of ``dst``.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        ValueError: This rank or the destination is not in the group, both ``dst`` and ``group_dst`` are
            given, or ``grad`` is unknown. Before communication.

    Source:
        ``torch.distributed.nn.functional.gather``.
    """
    is_replicated(grad)
    who = members(group)
    root = root_in_group(group, who, dst, group_dst, "dst", default=0)
    check_tensor("tensor", tensor)
    tensor = anchored(tensor, anchor)
    agree(check, who, f"gather to {root}", [tensor])
    return sent([tensor], Call("gather", who, "gather", root, separate_output=True), as_tuple)


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
        tensors: At the source W tensors of one shape and dtype. Elsewhere such a list, too, or ``None``.
        src: The source's rank in WORLD; 0 if neither is given.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        group_src: The source's rank in the group, instead of ``src``.
        like: A tensor with the shape and dtype that each rank gets. If given, it must be given on all
            ranks; otherwise the source sends a description first (``torch.compile`` cannot trace that: there
            every rank needs a list or ``like``).
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Raises:
        ValueError: The list does not have W entries of one shape and dtype, or is missing at the source; and
            as for :func:`broadcast`.

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
    # Before the description: ranks without like= would wait for it in vain if the source has like=.
    agree(check, who, f"scatter from {root}{'' if described_by_source else ' with like='}", [])
    description = None
    if header is not None:
        description = describe(header, who, root)
        like = given[0] if given else stand_in(description()[0], who)
    elif like is None:  # torch.compile cannot trace shapes that only another rank knows
        if not given:
            raise ValueError("under torch.compile every rank needs a list of tensors, or like=")
        like = given[0]
    # Lists of other ranks are part of the graph: their gradients are zeros, not None.
    parts = parts or [anchored(like.new_empty(0, *like.shape), anchor)]
    agree(check, who, f"scatter from {root} of {like.dtype} {tuple(like.shape)}", parts[:1], shapes=False)
    if given:
        unread = [] if description is None else [description]

        def after_description(part: torch.Tensor) -> torch.Tensor:
            while unread:  # needed by ranks without a list; it arrives with what it describes
                unread.pop()()
            return part

        return sent(parts, Call("scatter", who, "scatter", root, separate_input=True), after_description)
    # A scatter sends in the reverse direction; this rank has nothing to send.
    from_root, nothing = splits_to_root(1, who, root)
    call = Call("scatter", who, "scatter", root, input_splits=nothing, output_splits=from_root)
    return sent(parts, call, lambda row: row.squeeze(0))


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
