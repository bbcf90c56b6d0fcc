"""What a linear collective is called with, and which call its transpose is."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from dist_utils import GroupLike, resolve_group

__all__ = [
    "Call",
    "Members",
    "Tensors",
    "Wait",
    "members",
    "numbered",
    "padded_parts",
    "parts_of",
    "splits_to_root",
]

Tensors: TypeAlias = tuple[torch.Tensor, ...]

Wait: TypeAlias = Callable[[], Tensors]
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
    if torch.compiler.is_compiling():
        return Members(None, resolved.group_name, dist.get_world_size(resolved), dist.get_rank(resolved))
    return Members(resolved, resolved.group_name, resolved.size(), resolved.rank())


_TRANSPOSES = {
    # The total loss is the sum of all ranks' losses.
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    # The loss is one number that all ranks compute alike: nothing is added up over them.
    "replicated all_reduce": "copy",
    "copy": "replicated all_reduce",
    "replicated all_gather": "own part",
    "own part": "replicated all_gather",
    "replicated broadcast": "own if root",
    "own if root": "replicated broadcast",
}


class Call(NamedTuple):
    """Which collective, and everything that it needs beside its tensors.

    A collective that has a part for each rank takes or returns the parts one after the other along dimension
    0 of one tensor, or as W tensors, which saves a copy where they are apart anyway.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros elsewhere),
            ``"gather"`` to the root (elsewhere W tensors of zeros, or an empty one if they are joined),
            ``"scatter"`` from the root (takes such tensors elsewhere), ``"copy"`` (nothing happens),
            ``"own part"`` of equal parts, ``"own if root"`` (zeros elsewhere). The ``"replicated"`` ones
            differ in their transpose.
        who: The ranks.
        title: The public function that this is a step of, for errors.
        root: A rank in the group.
        input_splits: Of an exchange, and of a gather or scatter of joined parts: lengths along dimension 0
            for each rank. None if all ranks' parts are equal.
        output_splits: Likewise, from each rank.
        separate_input: Whether the parts that are taken are W tensors.
        separate_output: Whether the parts that are returned are.
        number: Which of the group's public calls it belongs to, the same on all ranks; so in backward too.
        order: How often it was transposed: 1 in a first backward, 2 in the backward of that, and so on.
    """

    kind: str
    who: Members
    title: str
    root: int = 0
    input_splits: tuple[int, ...] = ()
    output_splits: tuple[int, ...] = ()
    separate_input: bool = False
    separate_output: bool = False
    number: int = 0
    order: int = 0

    @property
    def name(self) -> str:
        """What happens: the kind, whatever its transpose."""
        return self.kind.removeprefix("replicated ")

    def range_name(self, part: str = "") -> str:
        """Return what a profiler calls it: the public function, and how often it was transposed.

        Args:
            part: Which part of it, if it is started early and waited for late.
        """
        return f"dist_autograd_collectives::{self.title}{':backward' * self.order}{part}"

    def transposed(self) -> Call:
        """Return the call whose map is the transpose of this one's."""
        return Call(
            _TRANSPOSES[self.kind],
            self.who,
            self.title,
            self.root,
            input_splits=self.output_splits,
            output_splits=self.input_splits,
            separate_input=self.separate_output,
            separate_output=self.separate_input,
            number=self.number,
            order=self.order + 1,
        )


_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()


def numbered(call: Call) -> Call:
    """Return a call with the next number of its group."""
    group = call.who.group
    if group is None or call.who.size == 1:
        return call
    numbers = _numbers.get(group)
    if numbers is None:
        numbers = _numbers.setdefault(group, itertools.count(1))
    return call._replace(number=next(numbers))


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


def parts_of(tensors: Tensors, call: Call) -> Tensors:
    """Return what a call takes for each rank."""
    if call.separate_input:
        return tensors
    if call.input_splits:
        return tensors[0].split_with_sizes(call.input_splits)
    return tensors[0].tensor_split(call.who.size)
