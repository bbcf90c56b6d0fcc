"""The arguments of a linear collective, and the call that is its transpose."""

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
"""Waits for a collective that was started, and returns what this rank received."""


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


def members(group: GroupLike) -> Members:
    """Return the ranks that take part; raises as :func:`dist_utils.resolve_group` does."""
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
    # The loss is one number that every rank computes: nothing is summed over the ranks.
    "replicated all_reduce": "copy",
    "copy": "replicated all_reduce",
    "replicated all_gather": "own part",
    "own part": "replicated all_gather",
    "replicated broadcast": "own if root",
    "own if root": "replicated broadcast",
}


class Call(NamedTuple):
    """A collective, and everything that it needs besides its tensors.

    A collective with one part per rank takes or returns the parts either one after the other along dimension
    0 of one tensor, or as W tensors, which saves a copy where they are separate anyway.

    Attributes:
        kind: ``"all_reduce"`` (sum), ``"all_gather"``, ``"reduce_scatter"`` (sum), ``"exchange"`` (all to
            all), ``"broadcast"`` from the root, ``"reduce"`` to the root (sum, zeros elsewhere),
            ``"gather"`` to the root (elsewhere W tensors of zeros, or one empty tensor if they are joined),
            ``"scatter"`` from the root (elsewhere it takes such tensors), ``"copy"`` (no communication),
            ``"own part"`` of equal parts, ``"own if root"`` (zeros elsewhere). The ``"replicated"`` ones
            differ in their transpose.
        who: The ranks.
        title: The public function that this is a step of, for errors.
        root: A rank in the group.
        input_splits: For an exchange, and for a gather or scatter of joined parts: lengths along dimension 0
            for each rank. Empty if all ranks' parts are equal.
        output_splits: Likewise, from each rank.
        separate_input: Whether the input parts are W tensors.
        separate_output: Whether the output parts are W tensors.
        number: The number of the public call within its group, the same on all ranks, also in backward.
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
        """The kind, without the convention for its transpose."""
        return self.kind.removeprefix("replicated ")

    def range_name(self, part: str = "") -> str:
        """Return the name that a profiler shows: the public function, and how often it was transposed.

        Args:
            part: A suffix for one part of the call, if it is started early and waited for late.
        """
        return f"dist_autograd_collectives::{self.title}{':backward' * self.order}{part}"

    def transposed(self) -> Call:
        """Return the call whose linear map is the transpose of this one's."""
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
    """Return the call with its group's next number."""
    group = call.who.group
    if group is None or call.who.size == 1:
        return call
    numbers = _numbers.get(group)
    if numbers is None:
        numbers = _numbers.setdefault(group, itertools.count(1))
    return call._replace(number=next(numbers))


def splits_to_root(length: int, who: Members, root: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return input and output splits with which every rank sends ``length`` to the root and nothing else."""
    to_root = tuple(length if rank == root else 0 for rank in range(who.size))
    from_all = (length if who.rank == root else 0,) * who.size
    return to_root, from_all


def padded_parts(x: torch.Tensor, who: Members) -> torch.Tensor:
    """Return all elements in W rows of one length, padded with zeros at the end."""
    length = -(-x.numel() // who.size)
    padded = torch.nn.functional.pad(x.flatten(), (0, length * who.size - x.numel()))
    return padded.view(who.size, length)


def parts_of(tensors: Tensors, call: Call) -> Tensors:
    """Return the input part for each rank."""
    if call.separate_input:
        return tensors
    if call.input_splits:
        return tensors[0].split_with_sizes(call.input_splits)
    return tensors[0].tensor_split(call.who.size)
