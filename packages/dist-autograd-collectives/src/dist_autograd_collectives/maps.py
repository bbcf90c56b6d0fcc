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
        others: The other ranks in the group, the next one first, so that not all send to one rank at once.
        on_one_host: Whether torchrun started all ranks of the job on this host.
        plans: The plans of calls, by all that they depend on.
        abandoned: Waits for what was started, and will not be waited for by whom it concerns.
    """

    on_one_host = False

    def __init__(self, group: dist.ProcessGroup, reference: weakref.ref[dist.ProcessGroup] | None) -> None:
        self._group = reference  # weak, because a group must end when it is destroyed
        self.name: str = group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
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

    def only(self, rank: int | None, length: int) -> tuple[int, ...]:
        """Return lengths for all ranks: this one for one rank, or for none, and 0 for the others."""
        return tuple([length if one == rank else 0 for one in range(self.size)])

    def from_root(self, root: int, length: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the lengths that this rank sends to each rank and receives, if only one rank sends."""
        incoming = self.only(root, length)
        return (incoming[self.rank],) * self.size, incoming


_DESTROYED = "it was destroyed by destroy_process_group: run backward before"
_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()


def members(group: GroupLike) -> Members:
    """Return the ranks that take part; raises as ``resolve_group`` does."""
    resolved = resolve_group(group)
    if torch.compiler.is_compiling():  # which knows groups by their names
        return Members(resolved, None)
    found = _members.get(resolved)
    if found is None:
        found = _members[resolved] = Members(resolved, weakref.ref(resolved))
        found.on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size())
    return found


@functools.cache
def hash_of_names(*names: object) -> int:
    """Return a hash that is the same in all processes, unlike Python's of strings."""
    return zlib.crc32(repr(names).encode())


Kind: TypeAlias = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "exchange", "broadcast", "reduce", "copy", "own_part"
]

_OF_THE_SUM: dict[Kind, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "copy": "all_reduce",
}
TRANSPOSES: dict[str, dict[Kind, Kind]] = {
    "sum": _OF_THE_SUM,
    "replicated": {**_OF_THE_SUM, "all_reduce": "copy", "all_gather": "own_part", "broadcast": "own_part"},
}
"""The transpose of each map, by the convention: of the sum of all ranks' losses; or of one loss that all of
them compute, for which nothing is summed, and a rank takes its own cotangents alone."""


@dataclass(eq=False)
class Map:
    """A linear map of all ranks' inputs to all ranks' outputs, as one rank sees it; never changed.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from a root, ``"reduce"`` to a root (sum), ``"copy"`` of what is the same on
            all ranks, or ``"own_part"``: this rank's part of its own input. The last two need no other rank.
        transpose: The kind of the map whose matrix is the transpose of this one's.
        title: The function that it belongs to, and the operation, for errors and profilers.
        who: The ranks.
        order: How often it was transposed: 1 in a first backward, 2 in the backward of that, and so on.
        input_splits: The lengths of the parts for each rank along dimension 0, if a rank may send another
            part to each rank, or nothing.
        output_splits: Likewise, of the parts from each rank.
        rows: The length of its tensors along dimension 0, if a rank may send or receive nothing: it takes
            tensors of this length there, too, and returns zeros.
        separate_input: Whether the parts for W ranks are W tensors, instead of one after the other in one.
        separate_output: Likewise, those from W ranks.
    """

    kind: Kind
    transpose: Kind
    title: str
    who: Members
    order: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    rows: int = 0
    separate_input: bool = False
    separate_output: bool = False

    @functools.cached_property
    def transposed(self) -> Map:
        """The map whose matrix is the transpose of this one's; the transpose of that is this map again."""
        return Map(
            self.transpose,
            self.kind,
            self.title,
            self.who,
            self.order + 1,
            self.output_splits,
            self.input_splits,
            self.rows,
            self.separate_output,
            self.separate_input,
        )

    @functools.cached_property
    def needs_others(self) -> bool:
        """Whether there is anything to communicate."""
        return self.who.size > 1 and self.kind not in ("copy", "own_part")

    @functools.cached_property
    def sums(self) -> bool:
        """Whether what a rank receives is added up."""
        return self.kind in ("all_reduce", "reduce_scatter", "reduce")

    @property
    def root(self) -> int:
        """Of a broadcast or a reduce: the only rank that sends, or receives, if anybody does."""
        lengths = self.output_splits if self.kind == "broadcast" else self.input_splits
        return lengths.index(max(lengths))

    @functools.cached_property
    def names(self) -> int:
        """A hash of what it is, for the tags of its messages."""
        return hash_of_names(self.title, self.kind, self.order)

    @functools.cached_property
    def range_name(self) -> str:
        """The name that a profiler shows: the public function, and how often it was transposed."""
        return f"dist_autograd_collectives::{self.title}{':backward' * self.order}"

    @functools.cached_property
    def targets(self) -> list[int]:
        """The other ranks to which this one sends."""
        return [rank for rank in self.who.others if not self.input_splits or self.input_splits[rank]]

    @functools.cached_property
    def sources(self) -> list[int]:
        """The other ranks from which this one receives, the one before it first."""
        others = reversed(self.who.others)
        return [rank for rank in others if not self.output_splits or self.output_splits[rank]]

    @functools.cached_property
    def receives_nothing(self) -> bool:
        """Whether this rank receives nothing, not even from itself, and returns zeros."""
        return len(self.output_splits) > 0 and not any(self.output_splits)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new tensor that stands for what is not received."""
        return like.new_zeros(self.rows, *like.shape[1:])

    def parts_of(self, tensors: Tensors) -> Tensors:
        """Return what this rank sends to each of its targets: a part, or the same to all."""
        if self.kind in ("all_reduce", "all_gather", "broadcast", "reduce") or not any(self.input_splits):
            return tensors * self.who.size
        return tensors if self.separate_input else tensors[0].split_with_sizes(self.input_splits)

    def new_results(self, like: torch.Tensor) -> tuple[Tensors, Tensors]:
        """Return tensors for what this rank receives, or zeros, and the place in them for each source."""
        size, shape = self.who.size, like.shape[1:]
        if self.receives_nothing:
            results = tuple([self.zeros(like) for _ in range(size if self.separate_output else 1)])
            return results, results * size
        if self.separate_output:
            results = tuple([like.new_empty(length, *shape) for length in self.output_splits])
            return results, results
        whole = like.new_empty(sum(self.output_splits), *shape)
        if self.kind == "broadcast":
            return (whole,), (whole,) * size
        return (whole,), whole.split_with_sizes(self.output_splits)
