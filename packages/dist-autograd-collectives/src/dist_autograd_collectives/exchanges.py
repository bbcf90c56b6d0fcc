"""Collectives in which each rank sends something different to each other rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from dist_autograd_collectives import arguments, maps
from dist_autograd_collectives.arguments import Sizes
from dist_autograd_collectives.collective import Compute, Plan, as_given, collective, first
from dist_autograd_collectives.maps import Parts, Tensors, members
from dist_utils import GroupLike


@collective
def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: GroupLike = None,
) -> Plan[Tensors]:
    """Send the ``r``-th tensor of the list to rank ``r``; the shapes may all differ.

    Gradient: the cotangents are sent back the same way.

    Args:
        output_tensor_list: W buffers with the shapes of the tensors that this rank receives; they are filled.
        input_tensor_list: W tensors.
        group: As for :func:`all_reduce`.

    Returns:
        New tensors that autograd sees, with the contents of ``output_tensor_list``.

    Raises:
        ValueError: A list does not have W entries of one dtype; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional.all_to_all``.
    """
    who = members(group)
    arguments.check_alike("output_tensor_list", output_tensor_list, who.size, shapes=False)
    arguments.check_alike("input_tensor_list", input_tensor_list, who.size, shapes=False)
    firsts = [output_tensor_list[0], input_tensor_list[0]]
    arguments.check_alike("output_tensor_list[0] and input_tensor_list[0]", firsts, 2, shapes=False)
    sent = Parts(tuple([entry.numel() for entry in input_tensor_list]), separate=True)
    received = Parts(tuple([entry.numel() for entry in output_tensor_list]), separate=True)
    shapes = [entry.shape for entry in output_tensor_list]
    plan: Plan[Any] = Plan("all_to_all", who, [input_tensor_list[0].flatten()], uneven_dim=0)
    plan.map("exchange", maps.flatten_each, sent, received, free=True)
    return plan.returning(lambda received: tuple(map(maps.of_shape, received, shapes)))


@collective
def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - torch's name for it
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: GroupLike = None,
) -> Plan[torch.Tensor]:
    """Split a tensor along dimension 0 and send the ``r``-th part to rank ``r``.

    Gradient: the cotangents are sent back the same way.

    Args:
        output: The buffer for the received parts, one after the other; it is filled.
        input: The tensor to split.
        output_split_sizes: Lengths of the received parts; ``None``, on all ranks, for equal ones.
        input_split_sizes: Lengths of the sent parts; likewise.
        group: As for :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output``.

    Raises:
        ValueError: The split sizes are not W numbers that add up to dimension 0; or this rank is not in
            the group.

    Source:
        ``torch.distributed.nn.functional.all_to_all_single``.
    """
    who = members(group)
    arguments.check_alike("output and input", [output, input], 2, shapes=False)
    for label, buffer in (("input", input), ("output", output)):
        if not buffer.ndim:
            raise ValueError(f"{label} has no dimension to split")
    if output.shape[1:] != input.shape[1:]:
        raise ValueError(f"output of shape {tuple(output.shape)} does not take rows of {tuple(input.shape)}")
    sent = Parts(arguments.split_sizes("input_split_sizes", input.shape[0], input_split_sizes, who))
    received = Parts(arguments.split_sizes("output_split_sizes", output.shape[0], output_split_sizes, who))
    plan: Plan[Any] = Plan("all_to_all_single", who, [input], uneven_dim=0)
    plan.map("exchange", as_given, sent, received, free=True)
    return plan.returning(first)


@collective
def all_to_all_dim(
    tensor: torch.Tensor,
    split_dim: int,
    cat_dim: int,
    *,
    input_sizes: Sequence[int] | None = None,
    output_sizes: Sizes = None,
    group: GroupLike = None,
) -> Plan[torch.Tensor]:
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
        group: As for :func:`all_reduce`.

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
    who = members(group)
    split_dim, cat_dim = (arguments.dimension(tensor.ndim, dim) for dim in (split_dim, cat_dim))
    # The split dimension goes first, so that parts are contiguous in memory; the other one is at this place.
    shape = [tensor.shape[split_dim], *tensor.shape[:split_dim], *tensor.shape[split_dim + 1 :]]
    place = 0 if cat_dim == split_dim else cat_dim + int(cat_dim < split_dim)
    lengths = arguments.split_sizes("input_sizes", shape[0], input_sizes, who)
    kept = [lengths[who.rank], *shape[1:]]
    arriving = arguments.known_sizes("output_sizes", kept[place], output_sizes, who)
    asked = ", auto" if arriving is None else ""
    terms = f", {split_dim}, {cat_dim}{f', {list(lengths)}' if place else ''}{asked}"
    plan: Plan[Any] = Plan("all_to_all_dim", who, [tensor], terms, uneven_dim=cat_dim)
    if arriving is None:
        return plan.asking("output_sizes", [kept[place]] * who.size if place else lengths)
    shapes = [[*kept[:place], length, *kept[place + 1 :]] for length in arriving]
    sent = Parts(tuple([length * math.prod(shape[1:]) for length in lengths]))
    incoming = [math.prod(shape) for shape in shapes]
    flat: Compute = lambda given: (given[0].movedim(split_dim, 0).flatten(),)  # noqa: E731
    plan.map("exchange", flat, sent, Parts(tuple(incoming)), free=True)

    def join(received: Tensors) -> torch.Tensor:
        if not place:
            return received[0].view(sum(arriving), *kept[1:]).movedim(0, split_dim)
        parts = zip(maps.split(received[0], incoming), shapes, strict=True)
        return maps.concatenate([part.view(one).movedim(0, split_dim) for part, one in parts], cat_dim)

    return plan.returning(join)


@collective
def permute(
    tensor: torch.Tensor, perm: Sequence[tuple[int, int]], *, group: GroupLike = None
) -> Plan[torch.Tensor]:
    """Send this rank's tensor to another rank and receive another's.

    Gradient: the cotangents are sent back. The source of a pair gets its destination's; a rank that sends
    nothing gets zeros.

    Args:
        tensor: Same shape and dtype on all ranks.
        perm: Pairs of a source and a destination (ranks in the group), the same on all ranks. No rank may be
            a source twice or a destination twice; a rank may be neither.
        group: As for :func:`all_reduce`.

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
    who, shape, pairs = members(group), tensor.shape, arguments.pairs_of_ranks(perm)
    for what, ranks in zip(("source", "destination"), zip(*pairs, strict=True), strict=False):
        if len(set(ranks)) < len(ranks) or not 0 <= min(ranks) <= max(ranks) < who.size:
            raise ValueError(
                f"each {what} in perm must be another rank from 0 to {who.size - 1}, got {pairs}"
            )
    to, source = dict(pairs).get(who.rank), {there: here for here, there in pairs}.get(who.rank)
    length = maps.count(shape)
    plan: Plan[Any] = Plan("permute", who, [tensor], f" {pairs}")
    plan.map("exchange", maps.as_rows, who.only(to, length), who.only(source, length), length)
    return plan.returning(lambda received: maps.of_shape(received[0], shape))
