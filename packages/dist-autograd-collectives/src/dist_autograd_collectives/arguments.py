"""Arguments of the collectives: checked on this rank, before communication, and normalized."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from dist_autograd_collectives.linear import is_recorded, is_traced
from dist_autograd_collectives.maps import Members, Parts
from dist_utils.torch_compat import private

Sizes: TypeAlias = Sequence[int] | Literal["auto"] | None
"""Lengths of the ranks' parts: given, asked for (``"auto"``), or equal (``None``)."""


def check_tensor(label: str, given: Any) -> torch.Tensor:
    """Return a dense tensor with memory, or one made by a transform or a compiler; raises for anything else.

    A subclass of users, whose methods may do anything, becomes a plain tensor.
    """
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{label} must be a tensor, got {type(given).__name__}")
    is_plain = type(given) in (torch.Tensor, torch.nn.Parameter) or is_traced()
    tensor = given if is_plain else _plain(label, given)
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = "a quantized one" if tensor.is_quantized else tensor.layout
        raise TypeError(f"{label} must be a dense tensor, got {'a nested one' if tensor.is_nested else kind}")
    return tensor


def check_tensors(label: str, given: Any) -> list[torch.Tensor]:
    """Return a list of dense tensors; raises if it is anything else."""
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{label} must be a list or tuple of tensors, got {type(given).__name__}")
    return [check_tensor(f"{label}[{index}]", entry) for index, entry in enumerate(given)]


def check_memory(tensors: Sequence[torch.Tensor]) -> None:
    """Raise if the storage of a tensor, which nothing transforms, was freed."""
    for tensor in tensors:
        if not tensor.untyped_storage().nbytes() and tensor.numel():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} has no memory: its storage was freed")


def _plain(label: str, given: torch.Tensor) -> torch.Tensor:
    """Return the tensor that an object of a subclass is; raises if it is made of others."""
    name = type(given).__name__
    if name == "AsyncCollectiveTensor":  # waits when it is used
        return given
    own_dispatch = type(given).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if own_dispatch:
        raise TypeError(
            f"{label} must be a tensor of this rank with memory of its own, got a {name}"
            f"{': see its to_local()' if name == 'DTensor' else ''}"
        )
    with private("torch._C", "DisableTorchFunctionSubclass", "tensors of a subclass")():
        return given.as_subclass(torch.Tensor)


def check_alike(label: str, tensors: Sequence[torch.Tensor], count: int, *, shapes: bool = True) -> None:
    """Raise unless these are ``count`` tensors of one dtype on one device, and of one shape if it matters."""
    # Compared, not hashed: symbolic shapes have no hash.
    kinds = [(tensor.dtype, tensor.device, tensor.shape if shapes else None) for tensor in tensors]
    if len(tensors) != count or any(kind != kinds[0] for kind in kinds):
        one = "one shape and dtype" if shapes else "one dtype"
        found = [f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" for tensor in tensors]
        raise ValueError(
            f"{label} must be {count} tensors of {one} on one device, got {', '.join(found) or 'none'}"
        )


def check_places(buffer: torch.Tensor) -> None:
    """Raise if several elements of a buffer share one place in memory."""
    if not buffer.is_contiguous():
        strides = zip(buffer.stride(), buffer.shape, strict=True)
        if any(stride == 0 and length > 1 for stride, length in strides):
            raise ValueError("the output is expanded: several of its elements share one place in memory")


def fill(buffer: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into the caller's buffer, which is not part of the graph and may be reused."""
    # The mode in which the buffer was made: a started collective ends outside of inference mode.
    inside = not torch.compiler.is_compiling() and buffer.is_inference()
    with torch.inference_mode() if inside else contextlib.nullcontext():
        buffer.detach().copy_(result.detach())


def root_in_group(who: Members, rank: int | None, in_group: int | None, what: str) -> int:
    """Return the root's rank in the group; raises unless it is given in exactly one way."""
    if (rank is None) == (in_group is None):
        raise ValueError(f"give either {what} or group_{what}")
    label, ranks = (f"group_{what}", range(who.size)) if rank is None else (what, who.ranks)
    (given,) = integers(label, [in_group if rank is None else rank])
    if given not in ranks:
        raise ValueError(f"{label} {given} is not a member of the process group with ranks {list(ranks)}")
    return ranks.index(given)


def integers(label: str, given: Any) -> list[Any]:
    """Return whole numbers; raises if it is anything else."""
    try:
        # Symbolic integers of torch.compile stay symbolic.
        return [size if isinstance(size, torch.SymInt) else operator.index(size) for size in given]
    except TypeError as error:
        raise TypeError(f"{label} must be integers, got {given!r}") from error


def pairs_of_ranks(given: Any) -> list[tuple[int, int]]:
    """Return pairs of whole numbers, which may be rows of an array; raises if it is anything else."""
    try:
        return [(operator.index(source), operator.index(destination)) for source, destination in given]
    except (TypeError, ValueError) as error:
        raise TypeError(f"perm must be a list of pairs of ranks, got {given!r}") from error


def dimension(ndim: int, dim: int) -> int:
    """Return a dimension counted from the front; raises if there is no such dimension."""
    integers("dim", [dim])
    if not -ndim <= dim < ndim:
        raise IndexError(f"dim {dim} is out of range for a tensor of {ndim} dimensions")
    return dim % ndim


def split_sizes(label: str, length: int, sizes: Sequence[int] | None, who: Members) -> tuple[int, ...]:
    """Return W lengths that add up to ``length``, equal ones if none are given; raises if they do not."""
    sizes = integers(label, sizes) if sizes is not None else []
    if not sizes:
        if length % who.size:
            raise ValueError(f"{label}: a length of {length} cannot be split into {who.size} equal parts")
        return (length // who.size,) * who.size
    if len(sizes) != who.size or sum(sizes) != length or min(sizes) < 0:
        raise ValueError(f"{label} must be {who.size} numbers that add up to {length}, got {list(sizes)}")
    return tuple(sizes)


def known_sizes(label: str, own: int, sizes: Sizes, who: Members) -> tuple[int, ...] | None:
    """Return W lengths, equal ones if none are given, or nothing if other ranks are to be asked for them.

    Raises if they do not fit this rank's own, or if nobody can be asked.
    """
    if sizes is None:
        return (own,) * who.size
    if isinstance(sizes, str) and sizes == "auto":
        if is_recorded():
            raise ValueError(
                f"{label}='auto' cannot be traced by torch.compile: only other ranks know the shapes"
            )
        return None
    lengths = integers(label, sizes)
    if len(lengths) != who.size or min(lengths) < 0:
        raise ValueError(f"{label} must be {who.size} lengths, got {lengths}")
    if lengths[who.rank] != own:
        raise ValueError(f"{label} {lengths} say {lengths[who.rank]} for rank {who.rank}, which has {own}")
    return tuple(lengths)


def check_own_part(sent: Parts, received: Parts, who: Members) -> None:
    """Raise if the part that this rank keeps is not as long as its place in the output."""
    kept, place = sent.lengths[who.rank], received.lengths[who.rank]
    if kept != place:
        raise ValueError(
            f"rank {who.rank} of the group keeps {kept} of its input, and its output has {place} for that"
        )
