"""Arguments of the collectives: checked before communication and normalized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch

from dist_autograd_collectives.calls import Members
from dist_autograd_collectives.tensor_arguments import check_tensor, integers, tensor_list
from dist_autograd_collectives.transforms import function_transforms_active
from dist_utils import GroupLike, group_rank

__all__ = [
    "Convention",
    "anchored",
    "check_buffer",
    "check_own_part",
    "checked_dim",
    "checked_sizes",
    "filled",
    "is_replicated",
    "kind_of",
    "one_for_each",
    "one_kind",
    "root_in_group",
    "shapes",
    "sizes_of_others",
]

Convention: TypeAlias = Literal["sum", "replicated"]
"""How the total loss is counted: the sum of the ranks' losses, or one loss that all ranks compute."""


def anchored(tensor: torch.Tensor, anchor: bool) -> torch.Tensor:
    """Return the tensor; with ``anchor``, one without a gradient is replaced by one that needs one."""
    if not isinstance(anchor, bool):
        raise TypeError(f"anchor must be True or False, got {type(anchor).__name__}")
    if not anchor:
        return tensor
    if torch.compiler.is_compiling() or function_transforms_active():  # refused on all ranks
        raise ValueError("anchor=True works neither under torch.compile nor under torch.func")
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().requires_grad_() if differentiable and not tensor.requires_grad else tensor


def is_replicated(grad: str) -> bool:
    """Return whether the convention is "replicated"; raises if ``grad`` is neither of the two."""
    if grad not in ("sum", "replicated"):
        raise ValueError(f"grad must be 'sum' or 'replicated', got {grad!r}")
    return grad == "replicated"


def kind_of(name: str, grad: str) -> str:
    """Return the kind of linear collective whose transpose fits the convention."""
    return f"replicated {name}" if is_replicated(grad) else name


def root_in_group(
    group: GroupLike,
    who: Members,
    rank: int | None,
    in_group: int | None,
    what: str,
    *,
    default: int | None = None,
) -> int:
    """Return the root's rank in the group."""
    if rank is None and in_group is None:
        rank = default
    if (rank is None) == (in_group is None):
        raise ValueError(f"give either {what} or group_{what}")
    integers(f"{what} or group_{what}", [in_group if rank is None else rank])
    if rank is not None:
        return group_rank(group, rank)
    if in_group is None or not 0 <= in_group < who.size:
        raise ValueError(f"group_{what} {in_group} is out of range for a group of {who.size} ranks")
    return in_group


def check_buffer(label: str, buffer: torch.Tensor, like: torch.Tensor) -> None:
    """Raise unless a result with the dtype and device of ``like`` can be written into a buffer."""
    check_tensor(label, buffer)
    if buffer.dtype != like.dtype or buffer.device != like.device:
        raise ValueError(
            f"{label} is {buffer.dtype} on {buffer.device}, the result {like.dtype} on {like.device}"
        )
    if buffer.is_contiguous():
        return
    if any(stride == 0 and length > 1 for stride, length in zip(buffer.stride(), buffer.shape, strict=True)):
        raise ValueError(f"{label} is expanded: several of its elements share one place in memory")


def filled(buffer: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Copy a result into the caller's buffer, which is not part of the graph and may be reused."""
    buffer.detach().copy_(result.detach())
    return result


def checked_dim(ndim: int, dim: int) -> int:
    """Return a dimension counted from the front; raises if there is no such dimension."""
    integers("dim", [dim])
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dimensions")
    return dim % ndim


def checked_sizes(label: str, length: int, sizes: Sequence[int] | None, who: Members) -> tuple[int, ...]:
    """Return W lengths that add up to ``length``, equal ones if none are given; raises if they do not."""
    sizes = integers(label, sizes) if sizes is not None else []
    if not sizes:
        if length % who.size:
            raise ValueError(f"{label}: a length of {length} cannot be split into {who.size} equal parts")
        return (length // who.size,) * who.size
    if len(sizes) != who.size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"{label} must be {who.size} numbers that add up to {length}, got {list(sizes)}")
    return tuple(sizes)


def sizes_of_others(label: str, own: int, sizes: Sequence[int], who: Members) -> tuple[int, ...]:
    """Return W lengths, checked against this rank's own; raises if they do not fit."""
    sizes = integers(label, sizes)
    if len(sizes) != who.size or min(sizes) < 0:
        raise ValueError(f"{label} must be {who.size} lengths, got {list(sizes)}")
    if sizes[who.rank] != own:
        raise ValueError(f"{label} {list(sizes)} say {sizes[who.rank]} for rank {who.rank}, which has {own}")
    return tuple(sizes)


def one_kind(label: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors as a list; raises if it is empty or they differ in dtype or device."""
    tensors = tensor_list(label, tensors)
    if len({(tensor.dtype, tensor.device) for tensor in tensors}) != 1:
        raise ValueError(f"{label} must be tensors of one dtype on one device, got {shapes(tensors)}")
    return tensors


def one_for_each(
    label: str, entries: Sequence[torch.Tensor], who: Members, *, like: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Return W tensors with the shape, dtype and device of ``like``, or of the first; raises otherwise."""
    entries = tensor_list(label, entries)
    like = like if like is not None or not entries else entries[0]
    if (
        like is None
        or len(entries) != who.size
        or any(
            entry.shape != like.shape or entry.dtype != like.dtype or entry.device != like.device
            for entry in entries
        )
    ):
        wanted = "" if like is None else f" of {like.dtype} and shape {tuple(like.shape)} on {like.device}"
        raise ValueError(f"{label} must have {who.size} tensors{wanted}, got {shapes(entries)}")
    return entries


def check_own_part(outgoing: Sequence[int], incoming: Sequence[int], who: Members) -> None:
    """Raise if the part that this rank keeps is not as long as its place in the output."""
    if outgoing[who.rank] != incoming[who.rank]:
        raise ValueError(
            f"rank {who.rank} of the group keeps {outgoing[who.rank]} of its input, and its output has "
            f"{incoming[who.rank]} for that"
        )


def shapes(entries: Sequence[torch.Tensor]) -> str:
    """Describe tensors for an error message."""
    return ", ".join(f"{entry.dtype} {tuple(entry.shape)}" for entry in entries) or "none"
