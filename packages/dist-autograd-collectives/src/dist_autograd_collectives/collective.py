"""Public functions: from a call to its result, at once or, after :func:`start`, later."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from dist_autograd_collectives import arguments, backend
from dist_autograd_collectives.comparison import compare, compares, tell
from dist_autograd_collectives.linear import Flight, linear
from dist_autograd_collectives.maps import remembered_members
from dist_autograd_collectives.plans import Call, Plan
from dist_autograd_collectives.transforms import function_transforms_active, is_recorded, outside_transforms
from dist_utils import resolve_group

P = ParamSpec("P")
T = TypeVar("T")

_MOST_PLANS = 1000
"""How many plans of a group are kept; a job whose shapes always change makes a plan for each call."""


def collective(*, fills: str = "") -> Callable[[Callable[P, Plan[T]]], Callable[P, T]]:
    """Make a public function of one that returns a plan for its arguments.

    The plan is kept for later calls in the same group with equal arguments; of tensors, which are found by
    the annotations, only shapes, dtypes and devices count.

    Args:
        fills: The argument with buffers for the results, if there is one.
    """

    def decorate(function: Callable[P, Plan[T]]) -> Callable[P, T]:
        planner = _Planner(function, fills)

        def make_call(*args: P.args, **kwargs: P.kwargs) -> Call[T]:
            if not compares():
                return planner.call(args, kwargs)
            try:
                made = planner.call(args, kwargs)
            except Exception as problem:
                tell(problem, planner.group_of(args, kwargs))
                raise
            compare(made)
            return made

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            made = make_call(*args, **kwargs)
            return _run(made, made.key())

        run.make_call = make_call  # type: ignore[attr-defined]
        result = str(planner.signature.return_annotation).removeprefix("Plan[").removesuffix("]")
        run.__signature__ = planner.signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return run

    return decorate


class _Planner(Generic[T]):
    """A function that returns plans, and where the tensors are among its arguments."""

    def __init__(self, function: Callable[..., Plan[T]], fills: str) -> None:
        self.function, self.signature = function, inspect.signature(function)
        names = list(self.signature.parameters)
        kinds = {name: str(self.signature.parameters[name].annotation) for name in names}
        self._group = names.index("group")
        self._tensors = [
            (place, name, "Sequence[torch.Tensor]" in kinds[name], "None" in kinds[name], name == fills)
            for place, name in enumerate(names)
            if "torch.Tensor" in kinds[name]
        ]
        self._without_key = {self._group, *(place for place, *_ in self._tensors)}
        self._names_without_key = {names[place] for place in self._without_key}

    def group_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return what the caller gave as the group."""
        return args[self._group] if len(args) > self._group else kwargs.get("group")

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call[T]:
        """Return the call with these arguments; raises if they are wrong."""
        recorded = is_recorded()
        traced = recorded or function_transforms_active()
        given: dict[str, Any] = {}
        inputs: list[torch.Tensor] = []
        buffers: list[torch.Tensor] = []
        for place, name, is_list, may_miss, is_buffer in self._tensors:
            value = args[place] if place < len(args) else kwargs.get(name)
            if value is None and may_miss:
                continue
            into = buffers if is_buffer else inputs
            if is_list:
                given[name] = arguments.check_tensors(name, value)
                into.extend(given[name])
            else:
                given[name] = arguments.check_tensor(name, value)
                into.append(given[name])
        for tensor in buffers:
            arguments.check_places(tensor)
        if not traced:
            arguments.check_memory(inputs)
        # Symbolic shapes, in a graph that is recorded, have no hash.
        plan = self.function(*args, **kwargs) if recorded else self._plan(args, kwargs, given)
        if plan.question is not None:
            asked = Call(plan, tuple(inputs), (), recorded, traced)
            return self.call(args, {**kwargs, plan.question.argument: _ask(asked, plan.question.lengths)})
        return Call(plan, tuple(inputs), tuple(buffers), recorded, traced)

    def _plan(self, args: Sequence[Any], kwargs: dict[str, Any], given: dict[str, Any]) -> Plan[T]:
        """Return the plan of an earlier call, or make it."""
        plans = remembered_members(resolve_group(self.group_of(args, kwargs))).plans
        try:
            found = [self.function, *given, *map(_form, given.values())]
            for place, value in enumerate(args):
                if place not in self._without_key:
                    found.append(_exact(value))
            for name, value in kwargs.items():
                # The name alone tells an argument that is given twice, which no function takes.
                found.append(name if name in self._names_without_key else (name, _exact(value)))
            key = tuple(found)
            plan: Plan[T] | None = plans.get(key)
        except TypeError:  # an argument has no hash
            key, plan = (), None
        if plan is None:
            plan = self.function(**{**self.signature.bind(*args, **kwargs).arguments, **given})
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            if key:
                plans[key] = plan
        return plan


def _form(value: Any) -> tuple[Any, ...]:
    """Return what plans depend on of a tensor, or of each in a list."""
    if isinstance(value, list):
        return tuple([(tensor.shape, tensor.dtype, tensor.device) for tensor in value])
    return value.shape, value.dtype, value.device


def _exact(value: Any) -> tuple[Any, ...]:
    """Return what only an equal argument of the same type has: 1, 1.0 and True are equal."""
    if isinstance(value, (list, tuple)):
        return tuple(value), *map(type, value)
    if isinstance(value, torch.Tensor):  # equal to itself, after it was changed, too
        raise TypeError
    return type(value), value


def _run(call: Call[T], key: int) -> T:
    """Run the steps of a call."""
    received = call.tensors
    for prepare, linear_map in call.plan.steps:
        received = linear(prepare(received), linear_map, key, is_traced=call.is_traced)
    return call.result(received)


def _ask(call: Call[Any], lengths: Sequence[int]) -> tuple[int, ...]:
    """Send each rank a length, and return those that they send to this one."""
    if compares():
        compare(call)
    with outside_transforms():  # nobody differentiates or records them
        own = torch.tensor(lengths, dtype=torch.int64, device=call.tensors[0].device)
        (received,) = backend.run((own,), call.plan.steps[0].map, call.key())
    return tuple(received.tolist())


class Handle(Generic[T]):
    """A running collective, returned by :func:`start`."""

    def __init__(self, call: Call[T]) -> None:
        self._call, self._key = call, call.key()
        self._result: list[T] = []
        self._with_gradients = torch.is_grad_enabled()
        self._loses_gradients = not self._with_gradients and any(x.requires_grad for x in call.tensors)
        if call.is_traced:
            self._result.append(_run(call, self._key))
            return
        self._lock = threading.RLock()
        prepare, linear_map = call.plan.steps[0]
        self._flight = Flight(linear_map, self._key)
        self._token = self._flight.launch(prepare(call.tensors))
        call.tensors = ()  # not kept as long as the handle

    def wait(self) -> T:
        """Wait for the result and return it, the same one every time.

        It has its gradient wherever it is waited for, also in ``torch.no_grad`` and inside a checkpoint, as a
        tensor has that was made where the collective was started.

        Raises:
            RuntimeError: The collective failed, or ran into its timeout; or an earlier wait has failed, or
                has not ended. Or it was started without gradients, in ``torch.no_grad`` or a checkpoint with
                ``use_reentrant=True``, and is waited for with them: the gradient of its tensors would be
                lost.
        """
        if self._loses_gradients and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._call.plan.title} was started without gradients (in torch.no_grad, or in a "
                "checkpoint with use_reentrant=True) from tensors that need one, and is waited for with "
                "gradients: start it with gradients too, or from detached tensors"
            )
        if not self._result:
            with self._lock:
                if not self._result:  # of another thread
                    self._result.append(self._finish())
        return self._result[0]

    def _finish(self) -> T:
        """Return the result, in the modes of the start; a checkpoint around it does not see what it saves."""
        with (
            outside_transforms(),
            torch.inference_mode(False),  # Dynamo takes no keyword
            torch.set_grad_enabled(self._with_gradients),
            saved_tensors_hooks(_same, _same),
        ):
            received = self._flight.arrive(self._token)
            for prepare, linear_map in self._call.plan.steps[1:]:
                received = linear(prepare(received), linear_map, self._key, is_traced=False)
            return self._call.result(received)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
    """Start a collective of this package and return at once, so that it overlaps what is computed next.

    In backward the roles change: the gradient's collective is launched where :meth:`Handle.wait` was called,
    and waited for where ``start`` was, so that it overlaps the backward of the computation between them.

    Args:
        function: A collective of this package, as in ``start(all_gather, x)``.
        args: Its arguments. Tensors must not be changed in place before the result has arrived.
        kwargs: Its keyword arguments.

    Returns:
        A handle whose :meth:`Handle.wait` returns what ``function(*args, **kwargs)`` would. All ranks must
            start, and wait for, the same collectives in the same order. It may be waited for several times,
            also inside a checkpoint of either kind. What a dropped handle has sent and not received is waited
            for by the group's next collective, never when the handle is freed.

    Raises:
        TypeError: ``function`` is not a collective of this package; and what the function itself raises.

    Cost:
        The cost of the function. Where that takes two collectives in sequence (MAX, MIN and
        PRODUCT for all ranks), the second one runs in ``wait``. Under ``torch.compile``, where the compiler
        decides when to wait, and under ``torch.func`` it is the function itself. The handle keeps its result:
        drop it after its last ``wait``.

    Example:
        >>> handle = start(all_gather, keys)  # doctest: +SKIP
        >>> queries = project(x)  # while the keys are sent # doctest: +SKIP
        >>> keys = handle.wait()  # doctest: +SKIP
    """
    make_call: Any = getattr(function, "make_call", None)
    if make_call is None:
        raise TypeError(f"start takes a collective of this package, got {function!r}")
    return Handle(make_call(*args, **kwargs))
