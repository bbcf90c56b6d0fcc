"""Collectives in which each rank sends something different to each other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_autograd_collectives.arguments import (
    Convention,
    anchored,
    check_buffer,
    check_own_part,
    checked_sizes,
    filled,
    is_replicated,
    one_kind,
    shapes,
)
from dist_autograd_collectives.calls import Call, members
from dist_autograd_collectives.compared_calls import agree, agree_on_splits
from dist_autograd_collectives.connecting import zeros_after
from dist_autograd_collectives.steps import Step, collective
from dist_autograd_collectives.tensor_arguments import check_tensor, integers
from dist_autograd_collectives.transport import sent
from dist_utils import GroupLike

__all__ = ["all_to_all", "all_to_all_single", "permute"]


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

    Gradient: the cotangents are sent back the same way.

    Args:
        output_tensor_list: W buffers with the shapes of the tensors that this rank receives; they are filled.
        input_tensor_list: W tensors.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        New tensors that autograd sees, with the contents of ``output_tensor_list``.

    Raises:
        ValueError: A list does not have W entries of one dtype; or this rank is not in the group.

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
    agree(check, who, "all_to_all", flat, uneven_dim=0)
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

    Gradient: the cotangents are sent back the same way.

    Args:
        output: The buffer for the received parts, one after the other; it is filled.
        input: The tensor to split.
        output_split_sizes: Lengths of the received parts; ``None``, on all ranks, for equal ones.
        input_split_sizes: Lengths of the sent parts; likewise.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        ValueError: The split sizes are not W numbers that add up to dimension 0; or this rank is not in
            the group.

    Source:
        ``torch.distributed.nn.functional.all_to_all_single``.
    """
    is_replicated(grad)
    who = members(group)
    check_tensor("input", input)
    check_buffer("output", output, input)
    for label, buffer in (("input", input), ("output", output)):
        if not buffer.ndim:
            raise ValueError(f"{label} has no dimension to split")
    if output.shape[1:] != input.shape[1:]:
        raise ValueError(f"output of shape {tuple(output.shape)} does not take rows of {tuple(input.shape)}")
    outgoing = checked_sizes("input_split_sizes", input.shape[0], input_split_sizes, who)
    incoming = checked_sizes("output_split_sizes", output.shape[0], output_split_sizes, who)
    check_own_part(outgoing, incoming, who)
    tensor = anchored(input, anchor)
    agree(check, who, "all_to_all_single", [tensor], uneven_dim=0)
    agree_on_splits(check, who, outgoing, incoming)
    if input_split_sizes is not None or output_split_sizes is not None:
        call = Call("exchange", who, "all_to_all_single", 0, outgoing, incoming)
    else:
        call = Call("exchange", who, "all_to_all_single")
    return sent([tensor], call, lambda received: filled(output, received))


@collective
def permute(
    tensor: torch.Tensor,
    perm: Sequence[tuple[int, int]],
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Step[torch.Tensor]:
    """Send this rank's tensor to another rank and receive another's.

    Gradient: the cotangents are sent back. The source of a pair gets its destination's; a rank that sends
    nothing gets zeros.

    Args:
        tensor: Same shape and dtype on all ranks.
        perm: Pairs of a source and a destination (ranks in the group), the same on all ranks. No rank may be
            a source twice or a destination twice; a rank may be neither.
        group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        grad: Both conventions agree here.
        anchor: Take part in backward even if no tensor needs a gradient on this rank.
        check: Compare the ranks' calls first. ``None``: only if ``DIST_AUTOGRAD_CHECK`` is set.

    Returns:
        The tensor of this rank's source; zeros if it has none.

    Raises:
        ValueError: A rank is not in the group, or is a source or a destination twice; or this rank is not in
            the group.

    Cost:
        One message to one rank, forward and backward.

    Source:
        ``jax.lax.ppermute``.

    Example:
        >>> ring = [(rank, (rank + 1) % size) for rank in range(size)]  # doctest: +SKIP
        >>> left_neighbors = permute(keys, ring)  # doctest: +SKIP
    """
    is_replicated(grad)
    who = members(group)
    check_tensor("tensor", tensor)
    pairs = _pairs(perm)
    for what, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        if len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < who.size:
            raise ValueError(
                f"each {what} in perm must be another rank from 0 to {who.size - 1}, got {pairs}"
            )
    tensor = anchored(tensor, anchor)
    agree(check, who, f"permute {pairs}", [tensor])
    to, source = dict(pairs).get(who.rank), {there: here for here, there in pairs}.get(who.rank)
    outgoing = tuple(int(rank == to) for rank in range(who.size))
    incoming = tuple(int(rank == source) for rank in range(who.size))
    row = tensor.unsqueeze(0)
    # A rank that sends nothing takes part in backward, too.
    parts = [row[:count] for count in outgoing]
    call = Call("exchange", who, "permute", 0, outgoing, incoming, separate_input=True)

    def received(rows: torch.Tensor) -> torch.Tensor:
        return rows.squeeze(0) if source is not None else zeros_after(rows, tensor)

    return sent(parts, call, received)


def _pairs(perm: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of ranks; raises if ``perm`` is anything else."""
    if not isinstance(perm, (list, tuple)) or any(len(integers("perm", pair)) != 2 for pair in perm):
        raise TypeError(f"perm must be a list of pairs of ranks, got {perm!r}")
    return [(source, destination) for source, destination in perm]
