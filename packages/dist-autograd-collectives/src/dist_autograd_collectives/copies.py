"""Collectives that copy tensors between ranks: from all, from one, or to one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_autograd_collectives import arguments
from dist_autograd_collectives.arguments import Sizes
from dist_autograd_collectives.calls import Convention, Map, Tensors, members
from dist_autograd_collectives.collective import collective, identity, prepare, step
from dist_autograd_collectives.linear import exchange_lengths
from dist_autograd_collectives.parts import join, pad, pieces
from dist_utils import GroupLike


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
) -> torch.Tensor:
    """Give every rank the tensor of rank ``src``, as a new tensor.

    Gradient: sum over s of g_s at the source (its own g with ``grad="replicated"``), zeros elsewhere.

    Args:
        tensor: At the source the tensor to send; elsewhere any tensor of its shape and dtype.
        src: The source's rank in WORLD.
        group: As for :func:`all_reduce`.
        group_src: The source's rank in the group, instead of ``src``.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        ValueError: This rank or the source is not in the group, not exactly one of ``src`` and
            ``group_src`` is given, or ``grad`` is unknown. Before communication.

    Cost:
        The tensor's bytes forward; twice that backward, or nothing with ``"replicated"``.

    Source:
        ``torch.distributed.nn.functional.broadcast``; torch's functional collectives have no gradient here.
    """
    who = members(group, grad)
    root = arguments.root_in_group(group, who, src, group_src, "src")
    tensor, terms = arguments.check_tensor("tensor", tensor), f" from {root}"
    call, tensors = prepare("broadcast", who, [tensor], anchor, check, terms=terms, grad=grad)
    return step(Map("broadcast", call, root), tensors, identity)


@collective
def all_gather(
    tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> tuple[torch.Tensor, ...]:
    """Give every rank all ranks' tensors, in rank order.

    Gradient of rank r: sum over s of the cotangent that rank s has for entry r; with
    ``grad="replicated"`` this rank's own cotangent of its own entry.

    Args:
        tensor: Same shape and dtype on all ranks.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.distributed.nn.functional.all_gather``.
    """
    who = members(group, grad)
    tensor = arguments.check_tensor("tensor", tensor)
    call, (tensor,) = prepare("all_gather", who, [tensor], anchor, check, grad=grad)

    def receive(*parts: torch.Tensor) -> Tensors:
        return tuple(part.view(tensor.shape) for part in parts)

    return step(Map("all_gather", call, separate_output=True), [tensor.flatten()], receive)


@collective
def all_gather_base(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: GroupLike = None,
    *,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Gather into one tensor: :func:`all_gather` whose result has the shape of ``output_tensor``.

    Args:
        output_tensor: W times the elements of the input; filled.
        input_tensor: Same shape and dtype on all ranks.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Returns:
        A new tensor that autograd sees, with the contents of ``output_tensor``.

    Raises:
        ValueError: The output does not have W times as many elements; or this rank is not in the group.

    Source:
        ``torch.distributed.nn.functional._all_gather_base``, which has no backward on Gloo.
    """
    who = members(group, grad)
    tensor = arguments.check_tensor("input_tensor", input_tensor)
    arguments.check_buffer("output_tensor", output_tensor, tensor)
    if output_tensor.numel() != who.size * tensor.numel():
        raise ValueError(
            f"output_tensor has {output_tensor.numel()} elements, but {who.size} ranks send "
            f"{tensor.numel()} each"
        )
    call, (tensor,) = prepare("all_gather_base", who, [tensor], anchor, check, grad=grad)
    return step(
        Map("all_gather", call),
        [tensor.flatten()],
        lambda flat: arguments.fill(output_tensor, flat.view(output_tensor.shape)),
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
) -> tuple[torch.Tensor, ...]:
    """Give rank ``dst`` all ranks' tensors, in rank order; the others get zeros.

    Gradient of rank r: the cotangent that ``dst`` has for entry r.

    Args:
        tensor: Same shape and dtype on all ranks.
        dst: The destination's rank in WORLD; 0 if neither is given.
        group: As for :func:`all_reduce`.
        group_dst: The destination's rank in the group, instead of ``dst``.
        grad: Both conventions agree here.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        ValueError: This rank or the destination is not in the group, both ``dst`` and ``group_dst`` are
            given, or ``grad`` is unknown. Before communication.

    Source:
        ``torch.distributed.nn.functional.gather``.
    """
    who = members(group, grad)
    dst = 0 if dst is None and group_dst is None else dst
    root = arguments.root_in_group(group, who, dst, group_dst, "dst")
    tensor = arguments.check_tensor("tensor", tensor)
    call, (tensor,) = prepare("gather", who, [tensor], anchor, check, terms=f" to {root}")
    length = tensor.numel()
    outgoing = tuple(length if rank == root else 0 for rank in range(who.size))
    incoming = (length if who.rank == root else 0,) * who.size
    exchange = Map("exchange", call, 0, outgoing, incoming, separate_output=True)

    def receive(*parts: torch.Tensor) -> Tensors:
        return tuple(pad(part, length).view(tensor.shape) for part in parts)

    return step(exchange, [tensor.flatten()], receive)


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
) -> torch.Tensor:
    """Give each rank its tensor from the list of rank ``src``.

    Gradient: at the source, entry r gets rank r's cotangent; lists of other ranks get zeros.

    Args:
        tensors: At the source W tensors of one shape and dtype. Elsewhere such a list, too, or ``None``.
        src: The source's rank in WORLD; 0 if neither is given.
        group: As for :func:`all_reduce`.
        group_src: The source's rank in the group, instead of ``src``.
        like: A tensor with the shape and dtype that this rank gets; needed where ``tensors`` is ``None``.
        grad: Both conventions agree here.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        ValueError: The list does not have W entries of one shape and dtype, or is missing at the source, or
            elsewhere without ``like``; and as for :func:`broadcast`.

    Cost:
        The list's bytes.

    Source:
        ``torch.distributed.nn.functional.scatter``, which fails on the ``None`` that it documents.
    """
    who = members(group, grad)
    src = 0 if src is None and group_src is None else src
    root = arguments.root_in_group(group, who, src, group_src, "src")
    like = like if like is None else arguments.check_tensor("like", like)
    if tensors is None and (like is None or who.rank == root):
        raise ValueError(f"the source needs a list of {who.size} tensors, other ranks a list or like=")
    given = [] if tensors is None else arguments.one_for_each("tensors", tensors, who, like=like)
    like = given[0] if like is None else like
    length, shape, is_root = like.numel(), like.shape, who.rank == root
    given = given or [like.detach()]
    call, given = prepare("scatter", who, given, anchor, check, terms=f" from {root}", shape=shape)
    # A list of a receiver is part of the graph, too: its gradient is zeros, not None.
    parts = [entry.flatten() if is_root else entry.flatten()[:0] for entry in given]
    outgoing = (length if is_root else 0,) * who.size
    incoming = tuple(length if rank == root else 0 for rank in range(who.size))
    exchange = Map("exchange", call, 0, outgoing, incoming, separate_input=tensors is not None)
    return step(exchange, parts, lambda part: pad(part, length).view(shape))


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
) -> torch.Tensor:
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
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

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
    who = members(group, grad)
    tensor = arguments.check_tensor("tensor", tensor)
    dim = arguments.dimension(tensor.ndim, dim)
    lengths = arguments.known_sizes("sizes", tensor.shape[dim], sizes, who)
    terms = f", {dim}, {sizes if sizes is None else list(lengths) or sizes}"
    uneven = None if sizes is None else dim
    call, (tensor,) = prepare(
        "all_gather_cat", who, [tensor], anchor, check, terms=terms, grad=grad, uneven_dim=uneven
    )
    rows, gather = tensor.movedim(dim, 0), Map("all_gather", call)
    if sizes is None:
        return step(gather, [rows], lambda whole: torch.movedim(whole, 0, dim))
    lengths = lengths or exchange_lengths([rows.shape[0]] * who.size, tensor, call)
    longest = max(lengths)

    def unpad(whole: torch.Tensor) -> torch.Tensor:
        parts = whole.view(who.size, longest, *whole.shape[1:]).unbind(0)
        found = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return torch.cat(found).movedim(0, dim)

    return step(gather, [pad(rows, longest)], unpad)


@collective
def all_gather_stack(
    tensor: torch.Tensor,
    dim: int = 0,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> torch.Tensor:
    """Give every rank all ranks' tensors, stacked along a new dimension in rank order.

    Gradient of rank r: its own entry of the sum of all ranks' cotangents; with ``grad="replicated"`` of this
    rank's cotangent.

    Args:
        tensor: Same shape and dtype on all ranks; may have no dimension.
        dim: The new dimension's position in the result; its length is W.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        IndexError: The result has no such dimension.
        ValueError: This rank is not in the group, or ``grad`` is unknown. Before communication.

    Cost:
        W - 1 times the tensor's bytes forward and backward; with ``"replicated"`` nothing backward.

    Source:
        ``torch.stack`` of ``torch.distributed.nn.functional.all_gather``, with one copy less.
    """
    who = members(group, grad)
    tensor = arguments.check_tensor("tensor", tensor)
    dim = arguments.dimension(tensor.ndim + 1, dim)
    call, (tensor,) = prepare("all_gather_stack", who, [tensor], anchor, check, terms=f", {dim}", grad=grad)
    return step(Map("all_gather", call), [tensor.unsqueeze(0)], lambda stack: torch.movedim(stack, 0, dim))


@collective
def all_gather_cat_coalesced(
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    *,
    group: GroupLike = None,
    grad: Convention = "sum",
    anchor: bool = False,
    check: bool | None = None,
) -> Tensors:
    """Concatenate each of several tensors over all ranks at once: :func:`all_gather_cat` of each.

    Gradient: as for :func:`all_gather_cat`. A result that is not used counts as zeros.

    Args:
        tensors: Tensors of one dtype on one device; same shapes in the same order on all ranks.
        dim: The dimension along which they are concatenated.
        group: As for :func:`all_reduce`.
        grad: As for :func:`all_reduce`.
        anchor: As for :func:`all_reduce`.
        check: As for :func:`all_reduce`.

    Raises:
        IndexError: A tensor has no such dimension.
        ValueError: There are no tensors, or they have several dtypes or devices; or this rank is not in the
            group.

    Cost:
        One all-gather of all bytes, and two copies of them.

    Source:
        ``torch.distributed._functional_collectives.all_gather_into_tensor_coalesced``.
    """
    who = members(group, grad)
    tensors = arguments.one_kind("tensors", tensors)
    dims = [arguments.dimension(tensor.ndim, dim) for tensor in tensors]
    title, terms = "all_gather_cat_coalesced", f", {dims}"
    call, tensors = prepare(title, who, tensors, anchor, check, terms=terms, grad=grad)
    rows = [tensor.movedim(place, 0) for tensor, place in zip(tensors, dims, strict=True)]

    def separate(whole: torch.Tensor) -> Tensors:
        parts = pieces(whole.view(who.size, -1), [row.shape for row in rows])
        return tuple(part.flatten(0, 1).movedim(0, place) for part, place in zip(parts, dims, strict=True))

    return step(Map("all_gather", call), [join(rows)], separate)
