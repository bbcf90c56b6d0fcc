"""Tensors as what ranks agree on: their kinds, not their values."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_utils.process_groups.agreement import AgreementError
from dist_utils.process_groups.errors import error_text
from dist_utils.process_groups.groups import GroupLike, collective_device, resolve_group
from dist_utils.process_groups.messages import all_gather_plain, gather_rows


class TensorMismatchError(AgreementError):
    """Ranks hold different numbers of tensors, or tensors of another name, shape, dtype, stride or kind."""


class TensorClaim(NamedTuple):
    """What a rank says about its tensors.

    Attributes:
        tensors: Name and description of each tensor.
        arguments: The arguments of the call, where they must be equal.
    """

    tensors: list[tuple[str, str]]
    arguments: str = ""

    @classmethod
    def of(cls, tensors: Sequence[Any], names: Sequence[str] | None, arguments: str = "") -> TensorClaim:
        """Describe tensors; raises if one is none, or if there are not as many names."""
        for index, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"tensors[{index}] is a {type(tensor).__name__}, not a tensor")
        labels = [""] * len(tensors) if names is None else list(map(str, names))
        if len(labels) != len(tensors):
            raise ValueError(f"{len(labels)} names for {len(tensors)} tensors")
        return cls(list(zip(labels, _descriptions(tensors), strict=True)), arguments)


def verify_param_shape_across_processes(
    process_group: GroupLike,
    tensors: Sequence[torch.Tensor],
    logger: Any = None,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Raise on every rank if the ranks' tensors do not match.

    Compared are their number and each one's name (if given), shape, dtype, device type, layout, stride and
    ``requires_grad``; not the values.

    Args:
        process_group: The ranks that compare: ``None`` for all, a process group or a 1-D DeviceMesh.
        tensors: This rank's, in the order that should match.
        logger: A ``torch.distributed.Logger`` that is told of a mismatch, as DDP's is.
        names: The names of the tensors. Without them the message has a position only.

    Raises:
        TensorMismatchError: On every rank, with the same message: the first tensor that differs, and what
            two ranks have there; or what is wrong on another rank.
        TypeError: Something in ``tensors`` is not a tensor; the other ranks get a ``TensorMismatchError``.
        ValueError: There are not as many names as tensors (the other ranks likewise get a
            ``TensorMismatchError``); or this rank is not in the group.

    Cost:
        One all-gather of 40 bytes a rank; if they differ, two more, of what each rank has.

    Source:
        ``torch.distributed.utils._verify_param_shape_across_processes``, which on a mismatch lets rank 0
        go on, and crashes without tensors.

    Example:
        >>> verify_param_shape_across_processes(None, list(model.parameters()))  # doctest: +SKIP
    """
    group = resolve_group(process_group)
    claim, problem = TensorClaim([]), None
    try:
        claim = TensorClaim.of(list(tensors), None if names is None else list(names))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    try:
        require_same_tensors(group, claim, problem)
    except TensorMismatchError as mismatch:
        if logger is not None:
            logger.set_error_and_log(str(mismatch))
        raise


def require_same_tensors(
    group: dist.ProcessGroup, claim: TensorClaim, problem: BaseException | None = None
) -> None:
    """Return if all ranks claim the same and none has a problem; otherwise raise on every rank.

    A rank with a problem raises that, after it has told the others. All travels in the group itself, in which
    ranks with such tensors are about to communicate: digests, and claims if these differ.

    Raises:
        TensorMismatchError: Claims differ, or another rank has a problem.
    """
    digest = hashlib.sha256(repr(claim).encode()).digest()
    numbers = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(collective_device(group))
    require_same_digest(group, numbers, lambda: claim, _first_difference, problem, TensorMismatchError)


def require_same_digest(
    group: dist.ProcessGroup,
    digest: torch.Tensor,
    claim: Callable[[], Any],
    difference: Callable[[dist.ProcessGroup, list[Any]], str],
    problem: BaseException | None,
    error: type[AgreementError] = AgreementError,
) -> None:
    """Return if all ranks have the same digest and none has a problem; otherwise raise on every rank.

    Args:
        group: The ranks, in which all travels.
        digest: Whole numbers (int64), as many on every rank, on a device that the group serves.
        claim: Returns what this rank says if digests differ: plain data, as for :func:`all_gather_plain`.
        difference: Takes the group and what all say; returns what differs, the same text on every rank.
        problem: Why this rank cannot go on, if so. It is raised here.
        error: The class of what the ranks without a problem raise.
    """
    if group.size() > 1 and dist.get_backend(group) != "fake":
        own = torch.nn.functional.pad(digest, (0, 1), value=float(problem is not None))
        differ = bool((gather_rows(group, own) != own).any())
        if differ or problem is not None:
            everyone = all_gather_plain(group, ["" if problem is None else error_text(problem), claim()])
            if problem is None:
                claims = [said for _, said in everyone]
                raise error(_first_problem(group, everyone) or difference(group, claims))
    if problem is not None:
        raise problem


def _first_problem(group: dist.ProcessGroup, everyone: list[Any]) -> str:
    for rank, (text, _) in zip(dist.get_process_group_ranks(group), everyone, strict=True):
        if text:
            return f"rank {rank} cannot go on: {text}"
    return ""


def _first_difference(group: dist.ProcessGroup, claims: list[Any]) -> str:
    ranks, everyone = dist.get_process_group_ranks(group), [TensorClaim(*claim) for claim in claims]
    first = everyone[0]
    for rank, claim in zip(ranks, everyone, strict=True):
        if claim.arguments != first.arguments:
            return f"rank {ranks[0]} was called with {first.arguments}, rank {rank} with {claim.arguments}"
    rows = enumerate(itertools.zip_longest(*(claim.tensors for claim in everyone)))
    position, row = next((position, row) for position, row in rows if any(one != row[0] for one in row))
    other = next(index for index, one in enumerate(row) if one != row[0])
    sides = []
    for index in (0, other):
        name, description = row[index] or ("", "none there")
        label = f"{name} of " if name else ""
        count = len(everyone[index].tensors)
        sides.append(f"rank {ranks[index]} has {label}{description} ({count} tensors)")
    return f"ranks hold different tensors, first at tensor {position}: {sides[0]}; {sides[1]}"


_KIND = operator.attrgetter("shape", "dtype", "device", "layout", "requires_grad")


def _descriptions(tensors: Sequence[torch.Tensor]) -> list[str]:
    """Describe tensors: each kind once, of which a module has few."""
    kinds = list(zip(map(_KIND, tensors), map(_memory, tensors), strict=True))
    texts = {kind: _description(*kind) for kind in set(kinds)}
    return [texts[kind] for kind in kinds]


def _memory(tensor: torch.Tensor) -> tuple[int, ...] | str:
    """Return the stride, or of a sparse tensor all that its parts need to match, but their length."""
    if tensor.layout is torch.strided:
        return tensor.stride()
    if tensor.layout is torch.sparse_coo:
        return f"sparse_dim {tensor.sparse_dim()}, dense_dim {tensor.dense_dim()}"
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed = tensor.crow_indices()
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        compressed = tensor.ccol_indices()
    else:
        return "opaque"
    element = tuple(tensor.values().shape[compressed.dim() :])  # a block, and the dense dimensions
    return f"{compressed.dtype} indices, elements of shape {element}"


def _description(kind: tuple[Any, ...], memory: tuple[int, ...] | str) -> str:
    shape, dtype, device, layout, requires_grad = kind
    memory = f"layout {layout}, {memory}" if isinstance(memory, str) else f"stride {memory}"
    return f"shape {tuple(shape)}, {dtype} on {device.type}, {memory}, requires_grad {requires_grad}"
