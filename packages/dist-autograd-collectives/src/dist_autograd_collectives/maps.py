"""What every collective is made of: linear maps of all ranks' tensors, and the ranks that take part."""

from __future__ import annotations

import functools
import os
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist

from dist_utils import GroupLike, resolve_group

Convention: TypeAlias = Literal["sum", "replicated"]
"""What the ranks do next with a result: different work (``"sum"``), or the same (``"replicated"``)."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


class Members:
    """The ranks that take part, and what this rank remembers of their calls.

    Attributes:
        name: The group's name.
        size: The number of ranks.
        rank: This rank in the group.
        ranks: All ranks in WORLD, in the group's order.
        on_one_host: Whether torchrun started all ranks of the job on this host.
        plans: The plans of calls, by all that they depend on.
        abandoned: Waits for what was started, and will not be waited for by whom it concerns.
    """

    def __init__(self, group: dist.ProcessGroup, reference: weakref.ref[dist.ProcessGroup] | None) -> None:
        self._group = reference  # weak, because a group must end when it is destroyed
        self.name: str = group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.on_one_host = False
        self.plans: dict[Any, Any] = {}
        self.abandoned: list[Callable[[], object]] = []
        self._calls = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; raises if it was destroyed."""
        group = None if self._group is None else self._group()
        if group is None:
            raise RuntimeError(_DESTROYED)
        return group

    def backends(self) -> str:
        """Return the backends of the group, as in ``"cpu:gloo,cuda:nccl"``; raises if it was destroyed."""
        try:
            return dist.get_backend_config(self.group)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            raise RuntimeError(_DESTROYED) from error

    def next_call(self) -> int:
        """Return the number of the next call, which all ranks count, in every grad mode."""
        self._calls += 1
        return self._calls


_DESTROYED = "it was destroyed by destroy_process_group: run backward before"
_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()


def members(group: GroupLike) -> Members:
    """Return the ranks that take part; raises as ``resolve_group`` does."""
    resolved = resolve_group(group)
    if torch.compiler.is_compiling():  # which knows groups by their names
        return Members(resolved, None)
    return remembered_members(resolved)


def remembered_members(group: dist.ProcessGroup) -> Members:
    """Return what this rank remembers of a group."""
    found = _members.get(group)
    if found is None:
        found = _members[group] = Members(group, weakref.ref(group))
        found.on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
    return found


@functools.cache
def hash_of_names(*names: object) -> int:
    """Return a hash that is the same in all processes, unlike Python's of strings."""
    return zlib.crc32(repr(names).encode())


Kind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "exchange", "broadcast", "reduce", "copy"
]

_TRANSPOSES: dict[Kind, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "copy": "all_reduce",
}
"""The total loss is the sum of all ranks' losses."""


@dataclass(eq=False)
class Map:
    """A linear map of all ranks' inputs to all ranks' outputs, as one rank sees it; never changed.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros elsewhere), or
            ``"copy"`` of what is the same on all ranks.
        title: The function that it belongs to, and the operation, for errors and profilers.
        who: The ranks.
        replicated: Whether all ranks' losses are one and the same, counted once.
        root: A rank in the group.
        input_splits: For an exchange: the lengths along dimension 0 of the parts for each rank. Empty if they
            are equal.
        output_splits: Likewise, from each rank.
        separate_input: Whether the parts for W ranks are W tensors, instead of one after the other in one.
            Parts lie along dimension 0.
        separate_output: Likewise, those from W ranks.
        alone: Whether a sum has the summand of this rank only, and so needs no communication.
        order: How often it was transposed: 1 in a first backward, 2 in the backward of that, and so on.
    """

    kind: Kind
    title: str
    who: Members
    replicated: bool = False
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    separate_input: bool = False
    separate_output: bool = False
    alone: bool = False
    order: int = 0

    @functools.cached_property
    def transposed(self) -> Map:
        """The map whose matrix is the transpose of this one's.

        If all ranks' losses are one, counted once, nothing is summed over the ranks: a rank takes its own
        cotangents alone. The transpose of that is the first map again.
        """
        return Map(
            _TRANSPOSES[self.kind],
            self.title,
            self.who,
            replicated=self.replicated,
            root=self.root,
            input_splits=self.output_splits,
            output_splits=self.input_splits,
            separate_input=self.separate_output,
            separate_output=self.separate_input,
            alone=self.replicated and not self.alone and self.kind not in ("exchange", "copy"),
            order=self.order + 1,
        )

    @property
    def needs_others(self) -> bool:
        """Whether there is anything to communicate."""
        return self.who.size > 1 and not self.alone and self.kind != "copy"

    @functools.cached_property
    def names(self) -> int:
        """A hash of what it is, for the tags of its messages."""
        return hash_of_names(self.title, self.kind, self.order)

    @functools.cached_property
    def targets(self) -> tuple[int, ...]:
        """The ranks to which this one sends: the next one first, so that not all send to one rank at once."""
        if self.kind == "broadcast" and self.who.rank != self.root:
            return ()
        return self._others(1, [self.root] if self.kind == "reduce" else range(self.who.size))

    @functools.cached_property
    def sources(self) -> tuple[int, ...]:
        """The ranks from which this one receives: the one before it first."""
        if self.kind == "reduce" and self.who.rank != self.root:
            return ()
        return self._others(-1, [self.root] if self.kind == "broadcast" else range(self.who.size))

    def _others(self, step: int, ranks: Any) -> tuple[int, ...]:
        size = self.who.size
        found = [(self.who.rank + step * distance) % size for distance in range(1, size)]
        return tuple(rank for rank in found if rank in ranks)

    def splits(self, rows: int) -> tuple[list[int], list[int]]:
        """Return how many of its rows this rank sends to each rank, and how many it receives from each."""
        size = self.who.size
        equal = [rows if self.kind == "all_gather" else rows // size] * size
        return list(self.input_splits) or equal, list(self.output_splits) or equal

    def parts_of(self, tensors: Tensors) -> Tensors:
        """Return what this rank sends to each rank if it sends anything: a part, or the same to all."""
        if self.kind in ("all_reduce", "all_gather", "broadcast", "reduce"):
            return tensors * self.who.size
        if self.separate_input:
            return tensors
        return tensors[0].split_with_sizes(self.splits(tensors[0].shape[0])[0])

    @functools.cached_property
    def range_name(self) -> str:
        """The name that a profiler shows: the public function, and how often it was transposed."""
        return f"dist_autograd_collectives::{self.title}{':backward' * self.order}"
