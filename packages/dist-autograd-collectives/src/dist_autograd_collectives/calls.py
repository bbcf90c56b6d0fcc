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


class Window:
    """A time in the life of a group: from one call that communicates to the next.

    Attributes:
        number: The number of that call, the same on all ranks.
        copies: How many calls of ``copy_to_group`` since then may communicate in backward.
    """

    __slots__ = ("copies", "number")

    def __init__(self, number: int) -> None:
        self.number, self.copies = number, 0


_windows: weakref.WeakKeyDictionary[dist.ProcessGroup, Window] = weakref.WeakKeyDictionary()


class Call(NamedTuple):
    """A call of a public function.

    Attributes:
        title: The function, and the operation, for errors and profilers.
        who: The ranks.
        replicated: Whether all ranks' losses are one and the same, counted once.
        form: A hash of the shapes that must be equal on all ranks.
        window: When it was made; ``None`` while something traces.
        copy: Its place among the copies of the window; 0 if it communicates in forward.
    """

    title: str
    who: Members
    replicated: bool = False
    form: int = 0
    window: Window | None = None
    copy: int = 0

    @property
    def key(self) -> int:
        """What tells this call's messages from those of the group's other calls.

        The same on all ranks, whatever a rank copies alone: such a copy has no number. Copies count from
        the newest one back when their backward runs.
        """
        if self.window is None:
            return self.form
        newer = self.window.copies - self.copy if self.copy else 0
        return hash((self.window.number, newer, self.form))

    def with_number(self, *, communicates: bool, differentiable: bool) -> Call:
        """Return the call with its place among its group's calls.

        Args:
            communicates: Whether it does so in forward; such calls are counted.
            differentiable: Whether its result has a backward on this rank.
        """
        group = self.who.group
        if group is None or self.who.size == 1:
            return self
        window = _windows.setdefault(group, Window(0))
        if communicates:
            window = _windows[group] = Window(window.number + 1)
        if communicates or not differentiable:
            return self._replace(window=window)
        window.copies += 1
        return self._replace(window=window, copy=window.copies)


@functools.cache
def hash_of_names(*names: object) -> int:
    """Return a hash that is the same in all processes, unlike Python's of strings."""
    return zlib.crc32(repr(names).encode())


Kind: TypeAlias = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "exchange",
    "broadcast",
    "reduce",
    "copy",
    "own part",
    "own if root",
]

_TRANSPOSES: dict[Kind, Kind] = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
}
"""The total loss is the sum of all ranks' losses."""

_REPLICATED_TRANSPOSES: dict[Kind, Kind] = {
    **_TRANSPOSES,
    "all_reduce": "copy",
    "copy": "all_reduce",
    "all_gather": "own part",
    "own part": "all_gather",
    "broadcast": "own if root",
    "own if root": "broadcast",
}
"""The loss is one number that every rank computes: nothing is summed over the ranks."""


class Map(NamedTuple):
    """A linear map of all ranks' inputs to all ranks' outputs, as one rank sees it.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros elsewhere), ``"copy"``
            (no communication), ``"own part"`` of equal parts, ``"own if root"`` (zeros elsewhere).
        call: The call that it belongs to.
        root: A rank in the group.
        input_splits: For an exchange: the lengths along dimension 0 of the parts for each rank. Empty if they
            are equal.
        output_splits: Likewise, from each rank.
        separate_input: Whether the parts for W ranks are W tensors, instead of one after the other along
            dimension 0 of one.
        separate_output: Likewise, those from W ranks.
        order: How often it was transposed: 1 in a first backward, 2 in the backward of that, and so on.
    """

    kind: Kind
    call: Call
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    separate_input: bool = False
    separate_output: bool = False
    order: int = 0

    def transpose(self) -> Map:
        """Return the map whose matrix is the transpose of this one's."""
        table = _REPLICATED_TRANSPOSES if self.call.replicated else _TRANSPOSES
        return Map(
            table[self.kind],
            self.call,
            self.root,
            input_splits=self.output_splits,
            output_splits=self.input_splits,
            separate_input=self.separate_output,
            separate_output=self.separate_input,
            order=self.order + 1,
        )

    @property
    def needs_others(self) -> bool:
        """Whether there is anything to communicate."""
        return self.call.who.size > 1 and self.kind not in ("copy", "own part", "own if root")

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
