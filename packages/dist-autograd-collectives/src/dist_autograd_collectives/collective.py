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
from dist_autograd_collectives.linear import Flight, linear
from dist_autograd_collectives.maps import Tensors, members
from dist_autograd_collectives.participation import compare, compares, tell
from dist_autograd_collectives.plans import Call, Plan, Step
from dist_autograd_collectives.transforms import function_transforms_active, is_recorded, outside_transforms

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

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            call = planner.begin(args, kwargs)
            return _finish(call, call.tensors, call.plan.steps)

        run.planner = planner  # type: ignore[attr-defined]
        result = str(planner.signature.return_annotation).removeprefix("Plan[").removesuffix("]")
        run.__signature__ = planner.signature.replace(return_annotation=result)  # type: ignore[attr-defined]
        return run

    return decorate


class _Planner(Generic[T]):
    """A function that returns plans, and where the tensors are among its arguments."""

    def __init__(self, function: Callable[..., Plan[T]], fills: str) -> None:
        self.function, self.signature = function, inspect.signature(function)
        parameters = self.signature.parameters.values()
        self._positional = [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY]
        self._tensors = {
            one.name: ("Sequence" in one.annotation, "None" in one.annotation, one.name == fills)
            for one in parameters
            if "torch.Tensor" in one.annotation
        }

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments by name, without checking them."""
        # As many names as arguments: torch.compile of torch 2.6 takes zip to be strict.
        names = self._positional[: len(args)]
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def begin(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call[T]:
        """Return the call with these arguments, which all ranks make now; raises if they are wrong."""
        if not compares():
            call = self.call(args, kwargs)
        else:
            try:
                call = self.call(args, kwargs)
            except Exception as problem:
                tell(problem, self.named(args, kwargs).get("group"))
                raise
            compare(call)
        call.take_key()
        return call

    def call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Call[T]:
        """Return the call with these arguments; raises if they are wrong."""
        given = self.named(args, kwargs)
        if len(given) < len(args) + len(kwargs):
            self.signature.bind(*args, **kwargs)  # raises: there is one too many, or one is given twice
        recorded = is_recorded()
        traced = recorded or function_transforms_active()
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
            arguments.check_memory(inputs)
        # Symbolic shapes, in a graph that is recorded, have no hash.
        plan = self.function(**given) if recorded else self._plan(given)
        if plan.question:
            asked = Call(plan, tuple(inputs), (), recorded, traced)
            return self.call((), {**given, plan.question: _ask(asked)})
        return Call(plan, tuple(inputs), tuple(buffers), recorded, traced)

    def _plan(self, given: dict[str, Any]) -> Plan[T]:
        """Return the plan of an earlier call with such arguments, or make it."""
        plans = members(given.get("group")).plans
        found: list[Any] = [self.function]
        try:
            for name, value in given.items():
                if name != "group":
                    found.append((name, _form(value) if name in self._tensors else _exact(value)))
            key = tuple(found)
            plan: Plan[T] | None = plans.get(key)
        except TypeError:  # an argument has no hash
            return self.function(**given)
        if plan is None:
            plan = self.function(**given)
            if len(plans) >= _MOST_PLANS:
                plans.clear()
            plans[key] = plan
        return plan


def _form(value: Any) -> tuple[Any, ...]:
    """Return what plans depend on of a tensor, or of each in a list."""
    if isinstance(value, list):
        return tuple(map(_form, value))
    return () if value is None else (value.shape, value.dtype, value.device)


def _exact(value: Any) -> tuple[Any, ...]:
    """Return what only an equal argument of the same type has: 1, 1.0 and True are equal."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_exact, value))
    if isinstance(value, torch.Tensor):  # equal to itself, after it was changed, too
        raise TypeError
    return type(value), value


def _finish(call: Call[T], received: Tensors, steps: Sequence[Step]) -> T:
    """Run these steps of a call on what the step before gave; return the result."""
    for prepare, linear_map in steps:
        received = linear(prepare(received), linear_map, call.key, is_traced=call.is_traced)
    return call.result(received)


def _ask(call: Call[Any]) -> tuple[int, ...]:
    """Send each rank a length, and return those that they send to this one."""
    if compares():
        compare(call)
    call.take_key()
    with outside_transforms():  # nobody differentiates or records them
        own = torch.tensor(call.plan.answer, dtype=torch.int64, device=call.tensors[0].device)
        (received,) = backend.run((own,), call.plan.steps[0].map, call.key)
    return tuple(received.tolist())


class Handle(Generic[T]):
    """A running collective, returned by :func:`start`."""

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._result: list[T] = []
        self._with_gradients = torch.is_grad_enabled()
        self._loses_gradients = not self._with_gradients and any(x.requires_grad for x in call.tensors)
        if call.is_traced:
            self._result.append(_finish(call, call.tensors, call.plan.steps))
            return
        self._lock = threading.RLock()
        prepare, linear_map = call.plan.steps[0]
        self._flight = Flight(linear_map, call.key)
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
            return _finish(self._call, self._flight.arrive(self._token), self._call.plan.steps[1:])


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
    planner: Any = getattr(function, "planner", None)
    if planner is None:
        raise TypeError(f"start takes a collective of this package, got {function!r}")
    return Handle(planner.begin(args, kwargs))
