"""What every collective is made of: linear maps of all ranks' rows, and the ranks that take part."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dist_autograd_collectives.reductions import wide_dtype
from dist_utils import GroupLike, resolve_group

Convention: TypeAlias = Literal["sum", "replicated"]
"""What the ranks do next with a result: different work (``"sum"``), or the same (``"replicated"``)."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


class Parts(NamedTuple):
    """What one rank sends to each rank, or receives from each; the same tensor if it has no lengths.

    Attributes:
        lengths: The parts' lengths along dimension 0, if these may differ; one of length 0 is not sent.
        separate: Whether they are W tensors, instead of one after the other in one.
    """

    lengths: tuple[int, ...] = ()
    separate: bool = False

    @property
    def are_empty(self) -> bool:
        """Whether nothing is sent, or received, not even from this rank to itself."""
        return len(self.lengths) > 0 and not any(self.lengths)

    def elements(self, rank: int, tensor: torch.Tensor) -> int:
        """Return the number of elements of one rank's part, made of such tensors."""
        return self.lengths[rank] * tensor.shape[1:].numel() if self.lengths else tensor.numel()


Splits: TypeAlias = tuple[Parts, Parts]
"""What this rank sends to each rank, and what it expects from each."""


class Members:
    """The ranks that take part, and what this rank remembers of their calls.

    Attributes:
        name: The group's name.
        size: The number of ranks.
        rank: This rank in the group.
        ranks: All ranks in WORLD, in the group's order.
        others: The other ranks in the group, the next one first, so that not all send to one rank at once.
        calls: The numbers of the next calls, which all ranks count, in every grad mode.
        plans: The plans of calls, by all that they depend on.
        abandoned: Waits for what was started, and will not be waited for by whom it concerns.
    """

    def __init__(self, group: dist.ProcessGroup, reference: weakref.ref[dist.ProcessGroup] | None) -> None:
        self._group = reference  # weak, because a group must end when it is destroyed
        self.name: str = group.group_name
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        self.plans: dict[Any, Any] = {}
        self.abandoned: list[Callable[[], object]] = []
        self.calls = itertools.count(1)

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; raises if it was destroyed."""
        group = None if self._group is None else self._group()
        try:
            if group is not None and dist.get_process_group_ranks(group):
                return group
        except KeyError:
            pass
        raise RuntimeError("it was destroyed by destroy_process_group: run backward before")

    def only(self, rank: int | None, length: int) -> Parts:
        """Return parts of this length for one rank, or for none, and empty ones for the others."""
        return Parts(tuple([length if one == rank else 0 for one in range(self.size)]))

    def from_root(self, root: int, shape: Sequence[int]) -> tuple[Parts, Parts, int]:
        """Return what a rank sends and receives if one rank sends tensors of this shape, and their rows."""
        rows = count(shape)
        received = self.only(root, rows)
        return Parts((received.lengths[self.rank],) * self.size), received, rows


_members: weakref.WeakKeyDictionary[dist.ProcessGroup, Members] = weakref.WeakKeyDictionary()


def members(group: GroupLike) -> Members:
    """Return the ranks that take part; raises as ``resolve_group`` does."""
    resolved = resolve_group(group)
    if torch.compiler.is_compiling():  # which knows groups by their names
        return Members(resolved, None)
    found = _members.get(resolved)
    if found is None:
        found = _members[resolved] = Members(resolved, weakref.ref(resolved))
    return found


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
        sent: The parts for each rank, if a rank may send another part to each rank, or nothing.
        received: Likewise, the parts from each rank.
        rows: The length of its tensors along dimension 0, if a rank may send or receive nothing: it takes
            tensors of this length there, too, and returns zeros.
        way: How it is started, once that was found: its tensors always have the same shapes and dtypes.
    """

    kind: Kind
    transpose: Kind
    title: str
    who: Members
    order: int
    sent: Parts  # no default: Dynamo of torch 2.6 knows none of such a type
    received: Parts
    rows: int = 0
    way: Any = None

    @functools.cached_property
    def transposed(self) -> Map:
        """The map whose matrix is the transpose of this one's; the transpose of that is this map again."""
        sides = self.received, self.sent
        return Map(self.transpose, self.kind, self.title, self.who, self.order + 1, *sides, self.rows)

    @property
    def needs_others(self) -> bool:
        """Whether there is anything to communicate."""
        return self.who.size > 1 and self.kind not in ("copy", "own_part")

    @property
    def sums(self) -> bool:
        """Whether what a rank receives is added up."""
        return self.kind in ("all_reduce", "reduce_scatter", "reduce")

    @property
    def root(self) -> int:
        """Of a broadcast or a reduce: the only rank that sends, or receives, if anybody does."""
        lengths = (self.received if self.kind == "broadcast" else self.sent).lengths
        return lengths.index(max(lengths))

    @functools.cached_property
    def range_name(self) -> str:
        """The name that a profiler shows: the public function, and how often it was transposed."""
        return f"dist_autograd_collectives::{self.title}{':backward' * self.order}"

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Return a new tensor that stands for what is not received."""
        return like.new_zeros(self.rows, *like.shape[1:])

    def parts_of(self, tensors: Tensors) -> Tensors:
        """Return what this rank sends to each of its targets: a part, or the same to all."""
        if self.kind in ("all_gather", "broadcast", "reduce") or not any(self.sent.lengths):
            return tensors * self.who.size
        return tensors if self.sent.separate else tensors[0].split_with_sizes(self.sent.lengths)

    def new_results(self, like: torch.Tensor) -> Tensors:
        """Return tensors for what this rank receives, made of such a tensor; zeros if that is nothing."""
        lengths, is_separate = self.received
        if self.received.are_empty:
            return tuple([self.zeros(like) for _ in (lengths if is_separate else lengths[:1])])
        shape = like.shape[1:]
        return tuple([like.new_empty(n, *shape) for n in (lengths if is_separate else [sum(lengths)])])


def pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return the rows, or zeros of this length that depend on them if there are none."""
    if not length or rows.shape[0]:
        return rows
    # A sum, because torch.nn.functional.pad of torch 2.6 pads nothing that is empty afterwards, or backward,
    # and Inductor leaves out of torch.cat what is empty: a collective of constant zeros, which belongs to
    # backward, would run in forward. In a dtype that has sums.
    zeros = rows.to(wide_dtype(rows.dtype)).sum(0, keepdim=True).to(rows.dtype)
    return zeros.expand(length, *rows.shape[1:]).contiguous()


def as_rows(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return the tensors, those without dimensions as a row: what is sent has rows, along dimension 0."""
    return tuple([tensor if tensor.ndim else tensor.view(1) for tensor in tensors])


def count(shape: Sequence[int]) -> int:
    """Return how many rows :func:`as_rows` makes of a tensor of this shape."""
    return shape[0] if shape else 1


def of_shape(received: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor in another shape; a view is made, with its place in the graph, only if it differs."""
    return received if received.shape == shape else received.view(shape)


def flatten_each(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Return each tensor's elements in a flat one."""
    return tuple([tensor.flatten() for tensor in tensors])


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """Return tensors one after the other along a dimension, in their dtype, also under autocast.

    The result depends on each of them, even on an empty one, so that backward, which the other ranks wait
    for, comes to all of them on this rank. ``torch.cat`` leaves empty tensors of one dimension out of the
    graph, but none of two; the same holds for the backward of ``torch.split``.
    """
    with _without_autocast(tensors[0].device.type):
        return torch.cat([tensor.unsqueeze(0) for tensor in tensors], 1 + dim).squeeze(0)


def _without_autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """Return a context in which dtypes stay as they are: a rank that pads must not differ from others."""
    # Dynamo of torch 2.6 cannot ask whether there is an autocast for the device.
    is_known = torch.compiler.is_compiling() or torch.amp.autocast_mode.is_autocast_available(device)
    if is_known and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def split(joined: torch.Tensor, lengths: Sequence[int]) -> Tensors:
    """Return the tensors that were concatenated along dimension 0."""
    return tuple(part.squeeze(0) for part in torch.split(joined.unsqueeze(0), list(lengths), 1))


def views_of_shapes(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Tensors:
    """Return the tensors of these shapes whose elements lie one after the other in a flat one.

    They are views that may be changed in place, unlike those of ``torch.split``.
    """
    ends = itertools.accumulate(shape.numel() for shape in shapes)
    places = zip(ends, shapes, strict=True)
    return tuple([flat[end - shape.numel() : end].view(shape) for end, shape in places])
