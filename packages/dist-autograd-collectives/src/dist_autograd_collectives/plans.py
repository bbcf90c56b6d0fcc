"""Plans: what a call does, made once for all calls of a function with equal arguments and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar, cast
from zlib import crc32

import torch

from dist_autograd_collectives.arguments import check_own_part, fill
from dist_autograd_collectives.maps import (
    TRANSPOSES,
    Convention,
    Kind,
    Map,
    Members,
    Tensors,
    hash_of_names,
)
from dist_autograd_collectives.rows import as_complex, as_real

T = TypeVar("T")
R = TypeVar("R")

Compute: TypeAlias = Callable[[Tensors], Tensors]
"""Computes, on one rank, what a map takes from what the caller gave, or from what the map before gave."""


class Step(NamedTuple):
    """One linear map on the way to a result, and what computes the tensors that it takes."""

    prepare: Compute
    map: Map


class Plan(Generic[T]):
    """What a call does: linear maps, and what is computed before, between and after them.

    It depends on nothing but what is known without the tensors' values, and must not keep the tensors of the
    call for which it is made.

    Args:
        title: The function, and the operation, for errors and profilers.
        who: The ranks.
        tensors: Tensors of the caller, whose dtypes are equal.
        terms: Every argument besides the title and the tensors that must be equal on all ranks.
        grad: The convention, where the two differ.
        shapes: The shapes that must be equal on all ranks, if not those of all tensors.
        uneven_dim: A dimension of theirs whose length may differ.
        splits: How many rows this rank sends to each rank, and how many it expects.

    Attributes:
        finish: Makes the result of what the last map gives.
        question: An argument, which stands for lengths that this plan still needs from the other ranks.
        answer: The lengths that this rank tells each rank for that.
    """

    finish: Callable[[Tensors], T]
    question = ""
    answer: Sequence[int] = ()

    def __init__(
        self,
        title: str,
        who: Members,
        tensors: Sequence[torch.Tensor],
        terms: str = "",
        *,
        grad: Convention | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        uneven_dim: int | None = None,
        splits: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        if grad not in (None, *TRANSPOSES):
            raise ValueError(f"grad must be 'sum' or 'replicated', got {grad!r}")
        if splits is not None:
            check_own_part(*splits, who)
        self.title, self.who, self.splits = title, who, splits
        self.terms = f"{terms}, {grad}" if grad else terms
        self.steps: list[Step] = []
        found = [tuple(shape) for shape in shapes or [tensor.shape for tensor in tensors]]
        if uneven_dim is not None:
            found = [(*shape[:uneven_dim], -1, *shape[uneven_dim + 1 :]) for shape in found]
        self.shapes, self._dtype, self._transposes = found, tensors[0].dtype, TRANSPOSES[grad or "sum"]
        self._key_base: int | None = None

    def map(self, kind: Kind, prepare: Compute, *lengths: Any, **separate: Any) -> None:
        """Append a step; complex tensors go as real and imaginary parts.

        Args:
            kind: The kind of its map.
            prepare: Computes what the map takes.
            lengths: The map's ``input_splits``, ``output_splits`` and ``rows``, as far as they matter.
            separate: Its ``separate_input`` and ``separate_output``.
        """
        if self._dtype.is_complex:
            prepare = _in_real(prepare, first=not self.steps)
        transpose = self._transposes[kind]
        self.steps.append(Step(prepare, Map(kind, transpose, self.title, self.who, 0, *lengths, **separate)))

    def returning(self, finish: Callable[[Tensors], R]) -> Plan[R]:
        """Return the plan, with what makes the result of what the last map gives."""
        plan = cast("Plan[R]", self)
        plan.finish = finish if not self._dtype.is_complex else lambda received: finish(as_complex(received))
        return plan

    def asking(self, argument: str, lengths: Sequence[int]) -> Plan[Any]:
        """Return the plan of a call that first asks the other ranks for lengths."""
        self.question, self.answer = argument, lengths
        one_each = (1,) * self.who.size
        exchange = Map("exchange", "exchange", f"{self.title} (sizes)", self.who, 0, one_each, one_each)
        self.steps = [Step(as_given, exchange)]
        return self

    def next_key(self) -> int:
        """Return what tells the next call's messages from those of the group's other calls.

        Calls whose shapes, dtypes or terms differ between ranks have different keys, so that their messages
        never meet. A mean may be sent in another dtype than the tensor's.
        """
        if self._key_base is None:
            self._key_base = hash(
                (tuple(self.shapes), hash_of_names(self._dtype), crc32(self.terms.encode()))
            )
        return hash((self.who.next_call(), self._key_base))


def as_given(tensors: Tensors) -> Tensors:
    """Return the tensors unchanged: a step that computes nothing."""
    return tensors


def first(received: Tensors) -> torch.Tensor:
    """Return the one tensor of a tuple."""
    return received[0]


def _in_real(prepare: Compute, *, first: bool) -> Compute:
    if first:
        return lambda tensors: as_real(prepare(tensors))
    return lambda received: as_real(prepare(as_complex(received)))


class Call(Generic[T]):
    """A call of a public function with its tensors, before it communicates.

    Attributes:
        plan: What it does.
        tensors: The caller's tensors.
        buffers: Where the caller wants the results, too.
        is_recorded: Whether it becomes part of a graph, of ``torch.compile`` or ``make_fx``.
        is_traced: Whether something records or transforms it.
        key: What tells its messages from those of the group's other calls.
    """

    key = 0

    def __init__(
        self, plan: Plan[T], tensors: Tensors, buffers: Tensors, is_recorded: bool, is_traced: bool
    ) -> None:
        self.plan, self.tensors, self.buffers = plan, tensors, buffers
        self.is_recorded, self.is_traced = is_recorded, is_traced

    def take_key(self) -> None:
        """Take what tells its messages from those of others; to be done once a call, by all ranks."""
        if not self.is_recorded:
            self.key = self.plan.next_key()
        elif not torch.compiler.is_compiling():
            self.key = hash((self.plan.who.next_call(), 0))

    def result(self, received: Tensors) -> T:
        """Return the result, which is also copied into the buffers."""
        result = self.plan.finish(received)
        if self.buffers:
            results: Any = result if isinstance(result, tuple) else (result,)
            for buffer, part in zip(self.buffers, results, strict=True):
                fill(buffer, part)
        return result
