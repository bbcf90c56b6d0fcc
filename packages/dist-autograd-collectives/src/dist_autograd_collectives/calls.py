"""What a collective is made of: a call of a public function, and the linear maps that it runs."""

from __future__ import annotations

import functools
import weakref
import zlib
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dist_utils import GroupLike, resolve_group

Convention: TypeAlias = Literal["sum", "replicated"]
"""How the total loss is counted: the sum of the ranks' losses, or one loss that all ranks compute."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]

Wait: TypeAlias = Callable[[], Tensors]
"""Waits for a map that was started, and returns what this rank received."""


class Members(NamedTuple):
    """The ranks that take part.

    Attributes:
        group: The process group; ``None`` while ``torch.compile`` traces: it knows groups by name.
        name: Its name.
        size: The number of ranks.
        rank: This rank in the group.
    """

    group: dist.ProcessGroup | None
    name: str
    size: int
    rank: int


def members(group: GroupLike, grad: Convention = "sum") -> Members:
    """Return the ranks that take part; raises if ``grad`` is no convention, and as ``resolve_group`` does."""
    if grad not in ("sum", "replicated"):
        raise ValueError(f"grad must be 'sum' or 'replicated', got {grad!r}")
    resolved = resolve_group(group)
    if torch.compiler.is_compiling():
        return Members(None, resolved.group_name, dist.get_world_size(resolved), dist.get_rank(resolved))
    return Members(resolved, resolved.group_name, resolved.size(), resolved.rank())


_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Call(NamedTuple):
    """A call of a public function.

    Attributes:
        title: The function, and the operation, for errors and profilers.
        who: The ranks.
        replicated: Whether all ranks' losses are one and the same, counted once.
        key: What tells its messages from those of the group's other calls.
        needs_gradient: Whether a tensor that the caller gave needs a gradient.
    """

    title: str
    who: Members
    replicated: bool
    key: int
    needs_gradient: bool = False

    @classmethod
    def next(cls, title: str, who: Members, grad: Convention, form: int, needs_gradient: bool) -> Call:
        """Return the next call of a group, which all ranks count, in every grad mode.

        Args:
            title: The function, and the operation.
            who: The ranks.
            grad: The convention.
            form: A hash of the shapes and dtypes that must be equal on all ranks.
            needs_gradient: Whether a tensor that the caller gave needs a gradient.
        """
        if who.group is not None:
            _numbers[who.group] = _numbers.get(who.group, 0) + 1
            form = hash((_numbers[who.group], form))
        return cls(title, who, grad == "replicated", form, needs_gradient)


@functools.cache
def hash_of_names(*names: object) -> int:
    """Return a hash that is the same in all processes, unlike Python's of strings."""
    return zlib.crc32(repr(names).encode())


Kind: TypeAlias = Literal["all_reduce", "all_gather", "reduce_scatter", "exchange", "broadcast", "reduce"]

_TRANSPOSES: dict[Kind, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
}
"""The total loss is the sum of all ranks' losses."""


class Map(NamedTuple):
    """A linear map of all ranks' inputs to all ranks' outputs, as one rank sees it.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros elsewhere).
        call: The call that it belongs to.
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
    call: Call
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    separate_input: bool = False
    separate_output: bool = False
    alone: bool = False
    order: int = 0

    def transpose(self) -> Map:
        """Return the map whose matrix is the transpose of this one's.

        If all ranks' losses are one, counted once, nothing is summed over the ranks: a rank takes its own
        cotangents alone. The transpose of that is the first map again.
        """
        return Map(
            _TRANSPOSES[self.kind],
            self.call,
            self.root,
            input_splits=self.output_splits,
            output_splits=self.input_splits,
            separate_input=self.separate_output,
            separate_output=self.separate_input,
            alone=self.call.replicated and not self.alone and self.kind != "exchange",
            order=self.order + 1,
        )

    @property
    def needs_others(self) -> bool:
        """Whether there is anything to communicate."""
        return self.call.who.size > 1 and not self.alone

    def splits(self, rows: int) -> tuple[list[int], list[int]]:
        """Return how many of its rows this rank sends to each rank, and how many it receives from each."""
        size = self.call.who.size
        equal = [rows if self.kind == "all_gather" else rows // size] * size
        return list(self.input_splits) or equal, list(self.output_splits) or equal

    def parts_of(self, tensors: Tensors) -> Tensors:
        """Return what this rank sends to each rank if it sends anything: a part, or the same to all."""
        if self.kind in ("all_reduce", "all_gather", "broadcast", "reduce"):
            return tensors * self.call.who.size
        if self.separate_input:
            return tensors
        return tensors[0].split_with_sizes(self.splits(tensors[0].shape[0])[0])

    def range_name(self, stage: str = "") -> str:
        """Return the name that a profiler shows: the public function, and how often it was transposed.

        Args:
            stage: A suffix for one part of it, if it is started early and waited for late.
        """
        return f"dist_autograd_collectives::{self.call.title}{':backward' * self.order}{stage}"
