"""Public functions: from a call to its result, by a plan that is made once for calls with equal arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeAlias, TypeVar

import torch

from dist_autograd_collectives import arguments, linear, maps, participation
from dist_autograd_collectives.maps import TRANSPOSES, Convention, Kind, Map, Members, Parts, Splits, Tensors

P = ParamSpec("P")
T = TypeVar("T")

Compute: TypeAlias = Callable[[Tensors], Tensors]
"""Computes, on one rank, what a map takes from what the caller gave, or from what the map before gave."""


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
        uneven_dim: A dimension whose length may differ; all others must be equal on all ranks.

    Attributes:
        splits: How many rows this rank sends to each rank, and how many it expects, if ranks know no others.
        finish: Makes the result of what the last map gives.
        question: An argument of the call, if the plan's result is not the call's, but the lengths for it.
    """

    finish: Callable[[Tensors], T]
    splits: Splits | None = None
    question = ""

    def __init__(
        self,
        title: str,
        who: Members,
        tensors: Sequence[torch.Tensor],
        terms: str = "",
        *,
        grad: Convention | None = None,
        uneven_dim: int | None = None,
    ) -> None:
        if grad not in (None, *TRANSPOSES):
            raise ValueError(f"grad must be 'sum' or 'replicated', got {grad!r}")
        self.title, self.who = title, who
        self.terms = f"{terms}, {grad}" if grad else terms
        self.steps: list[tuple[Compute, Map]] = []
        found = [tuple(tensor.shape) for tensor in tensors]
        if uneven_dim is not None:
            found = [(*shape[:uneven_dim], -1, *shape[uneven_dim + 1 :]) for shape in found]
        self.shapes, self._dtype, self._transposes = found, tensors[0].dtype, TRANSPOSES[grad or "sum"]

    def map(self, kind: Kind, prepare: Compute, *parts: Any, free: bool = False) -> None:
        """Append a step.

        Args:
            kind: The kind of its map.
            prepare: Computes what the map takes.
            parts: The map's ``sent``, ``received`` and ``rows``, as far as they matter.
            free: Whether each rank is told its own parts only.
        """
        sides = parts or (Parts(), Parts())
        linear_map = Map(kind, self._transposes[kind], self.title, self.who, 0, *sides)
        if free:
            self.splits = linear_map.sent, linear_map.received
            arguments.check_own_part(*self.splits, self.who)
        self.steps.append((prepare, linear_map))

    def returning(self, finish: Callable[[Tensors], T]) -> Plan[T]:
        """Return the plan, with what makes the result of what the last map gives."""
        self.finish = finish
        return self

    def asking(self: Plan[Any], argument: str, lengths: Sequence[int]) -> Plan[Any]:
        """Return the plan, which first asks the other ranks for lengths, and tells them these."""
        self.question, one_each = argument, Parts((1,) * self.who.size)
        asked = functools.partial(torch.tensor, lengths, dtype=torch.int64)
        self.map("exchange", lambda given: (asked(device=given[0].device),), one_each, one_each)
        return self.returning(lambda received: received[0].tolist())

    @functools.cached_property
    def number(self) -> int:
        """What tells messages of its calls from those of calls with other shapes, dtypes or terms.

        A mean may be sent in another dtype than the tensor's.
        """
        return hash((tuple(self.shapes), maps.hash_of_names(self._dtype, self.terms)))

    def begin(self, tensors: Tensors, *, is_recorded: bool) -> int:
        """Compare the ranks' calls, if that is switched on, and return the key of this one; on all ranks."""
        if is_recorded:  # symbolic shapes have no hash, and graphs that are compiled no numbers
            return 0 if torch.compiler.is_compiling() else hash((next(self.who.calls), 0))
        if participation.compares.get():
            participation.compare(self.who, f"{self.title}{self.terms}", tensors, self.shapes, self.splits)
        return hash((next(self.who.calls), self.number))


def as_given(given: T) -> T:
    """Return a tensor, or several, unchanged: a step that computes nothing."""
    return given


def first(received: Tensors) -> torch.Tensor:
    """Return the one tensor of a tuple."""
    return received[0]


@dataclass(eq=False)
class Call(Generic[T]):
    """A call of a public function with its tensors.

    Attributes:
        plan: What it does.
        tensors: The caller's tensors.
        buffers: Where the caller wants the results, too.
        is_traced: Whether something records or transforms it.
        key: What tells its messages from those of the group's other calls.
    """

    plan: Plan[T]
    tensors: Tensors
    buffers: Tensors
    is_traced: bool
    key: int

    def finish(self, received: Tensors, steps: Sequence[tuple[Compute, Map]]) -> T:
        """Run these steps on what the caller or the step before gave; return the result, also in buffers."""
        for prepare, linear_map in steps:
            received = linear.apply(prepare(received), linear_map, self.key, is_traced=self.is_traced)
        result = self.plan.finish(received)
        if self.buffers:
            results: Any = result if isinstance(result, tuple) else (result,)
            for buffer, part in zip(self.buffers, results, strict=True):
                arguments.fill(buffer, part)
        return result


_MOST_PLANS = 1000
"""How many plans of a group are kept; a job whose shapes always change makes a plan for each call."""


def collective(function: Callable[P, Plan[T]]) -> Callable[P, T]:
    """Make a public function of one that returns a plan for its arguments.

    The plan is kept for later calls in the same group with equal arguments; of tensors, which are found by
    the annotations, only shapes, dtypes and devices count. Buffers for results have names with "output".
    """
    planner = _Planner(function)

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        call = planner.begin(args, kwargs)
        return call.finish(call.tensors, call.plan.steps)

    run.planner = planner  # type: ignore[attr-defined]
    result = str(planner.signature.return_annotation).removeprefix("Plan[").removesuffix("]")
    run.__signature__ = planner.signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, "return": result}  # what typing.get_type_hints reads
    return run


class _Planner(Generic[T]):
    """A function that returns plans, and where the tensors are among its arguments."""

    def __init__(self, function: Callable[..., Plan[T]]) -> None:
        self.function, self.signature = function, inspect.signature(function)
        parameters = self.signature.parameters.values()
        self._positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
        self._tensors = {
            one.name: ("Sequence" in one.annotation, "None" in one.annotation, "output" in one.name)
            for one in parameters
            if "torch.Tensor" in one.annotation
        }

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call[T]:
        """Return the call with these arguments, which all ranks make now; raises if they are wrong."""
        # As many names as arguments: torch.compile of torch 2.6 takes zip to be strict.
        names = self._positional[: len(args)]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        try:
            if len(given) < len(args) + len(kwargs):
                self.signature.bind(*args, **kwargs)  # raises: there is one too many, or one is given twice
            return self._call(given)
        except Exception as problem:
            if not linear.is_recorded() and participation.compares.get():
                participation.tell(problem, given.get("group"))
            raise

    def _call(self, given: dict[str, Any]) -> Call[T]:
        """Return the call with these arguments by name; raises if they are wrong."""
        recorded = linear.is_recorded()
        traced = recorded or linear.function_transforms_active()
        inputs: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for name, (is_list, may_miss, is_buffer) in self._tensors.items():
            value = given.get(name)
            if value is None and may_miss:
                continue
            found = arguments.check_tensors(name, value) if is_list else [arguments.check_tensor(name, value)]
            (buffers if is_buffer else inputs).extend(found)
            given[name] = found if is_list else found[0]
        for tensor in buffers:
            arguments.check_places(tensor)
        if not traced:
            arguments.check_memory([*inputs, *buffers])
        # Symbolic shapes, in a graph that is recorded, have no hash.
        plan = self.function(**given) if recorded else self._plan(given)
        key = plan.begin(tuple(inputs), is_recorded=recorded)
        call = Call(plan, tuple(inputs), tuple(buffers), traced, key)
        if not plan.question:
            return call
        with linear.outside_transforms():  # nobody differentiates or records the lengths
            given[plan.question] = call.finish(call.tensors, plan.steps)
        return self._call(given)

    def _plan(self, given: dict[str, Any]) -> Plan[T]:
        """Return the plan of an earlier call with such arguments, or make it."""
        plans = maps.members(given.get("group")).plans
        forms = [
            (name, _form(value, is_tensor=name in self._tensors))
            for name, value in given.items()
            if name != "group"
        ]
        try:
            key = (self.function, *forms)
            plan: Plan[T] | None = plans.get(key)
        except TypeError:  # an argument has no hash
            return self.function(**given)
        if plan is None:
            plan = self.function(**given)
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
        return plan


def _form(value: Any, *, is_tensor: bool) -> Any:
    """Return what plans depend on of an argument; it has a hash if an equal one makes an equal plan."""
    if isinstance(value, (list, tuple)):
        return tuple([_form(one, is_tensor=is_tensor) for one in value])
    # Anything else may change in place between two calls, as the values of a dict do.
    if value is not None and not isinstance(value, (str, int, torch.distributed.ReduceOp.RedOpType)):
        return (value.shape, value.dtype, value.device) if is_tensor else []
    return type(value), value  # 1, 1.0 and True are equal
