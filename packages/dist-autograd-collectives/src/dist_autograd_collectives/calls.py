"""What a linear collective is called with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dist_utils import GroupLike, resolve_group

__all__ = ["Call", "Members", "Wait", "members", "padded_parts", "splits_to_root"]

Wait: TypeAlias = Callable[[], torch.Tensor]
"""A collective that has begun: waits for it and returns what this rank received."""


class Members(NamedTuple):
    """Who takes part.

    Attributes:
        group: The process group; ``None`` while ``torch.compile`` traces, which knows groups by name.
        name: Its name.
        size: The number of ranks.
        rank: This rank in the group.
    """

    group: dist.ProcessGroup | None
    name: str
    size: int
    rank: int


def members(group: GroupLike) -> Members:
    """Return who takes part; raises as :func:`dist_utils.resolve_group`."""
    resolved = resolve_group(group)
    size, rank = dist.get_world_size(resolved), dist.get_rank(resolved)
    return Members(
        None if torch.compiler.is_compiling() else resolved,
        resolved.group_name,
        size,
        rank,
    )


class Call(NamedTuple):
    """Which collective, and everything that it needs beside its tensor.

    Attributes:
        kind: All but the elementwise ones work along dimension 0: ``"all_reduce"`` (sum), ``"all_gather"``
            (concatenated), ``"reduce_scatter"`` (sum), ``"exchange"`` (all to all), ``"broadcast"`` from the
            root, ``"reduce"`` to the root (sum, zeros elsewhere), ``"gather"`` to the root (nothing
            elsewhere), ``"scatter"`` from the root, ``"copy"`` (nothing happens), ``"own part"`` of equal
            parts, ``"own if root"`` (zeros elsewhere). The ``"replicated"`` ones differ in their transpose.
        who: The ranks.
        title: The public function that this is a part of, for errors.
        root: A rank in the group.
        input_splits: Of an exchange, a gather or a scatter: lengths along dimension 0 for each rank.
        output_splits: Likewise, from each rank.
    """

    kind: str
    who: Members
    title: str
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()


def splits_to_root(length: int, who: Members, root: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return input and output splits where every rank sends ``length`` to the root, and nothing else."""
    to_root = tuple(length if rank == root else 0 for rank in range(who.size))
    from_all = (length if who.rank == root else 0,) * who.size
    return to_root, from_all


def padded_parts(x: torch.Tensor, who: Members) -> torch.Tensor:
    """Return all elements in W rows of one length, zeros at the end."""
    length = -(-x.numel() // who.size)
    padded = torch.nn.functional.pad(x.flatten(), (0, length * who.size - x.numel()))
    return padded.view(who.size, length)
