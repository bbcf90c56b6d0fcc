"""What a collective function consists of: something to send, how, and what is made of what arrives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dist_autograd_collectives.agreement import tell_others
from dist_autograd_collectives.calls import Call, Tensors
from dist_autograd_collectives.linear import Flight, linear
from dist_utils.torch_compat import function_transforms_active

__all__ = ["Handle", "Step", "collective", "start"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Step(Generic[T]):
    """A linear collective in the making of a result.

    Attributes:
        tensors: What this rank sends.
        call: How.
        after: Makes the result of what this rank receives, or the next step.
    """

    tensors: Tensors
    call: Call
    after: Callable[..., T | Step[T]]


def collective(plan: Callable[P, Step[T]]) -> Callable[P, T]:
    """Make a public function of one that returns its first step: it takes all of them."""

    @functools.wraps(plan)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        first: T | Step[T] = planned(*args, **kwargs)
        return _completed(first)

    def planned(*args: P.args, **kwargs: P.kwargs) -> Step[T]:
        if torch.compiler.is_compiling():
            return plan(*args, **kwargs)
        try:
            return plan(*args, **kwargs)
        except (IndexError, TypeError, ValueError) as problem:
            given = signature.bind(*args, **kwargs).arguments
            tell_others(problem, given.get("check"), given.get("group"))
            raise

    signature = inspect.signature(plan)
    result = str(signature.return_annotation).removeprefix("Step[").removesuffix("]")
    run.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**plan.__annotations__, "return": result}
    run.plan = planned  # type: ignore[attr-defined]
    return run


def _completed(result: T | Step[T]) -> T:
    while isinstance(result, Step):
        result = result.after(*linear(result.tensors, result.call))
    return result


class Handle(Generic[T]):
    """A collective under way, from :func:`start`."""

    def __init__(self, first: Step[T]) -> None:
        self._after = first.after
        self._result: list[T] = []
        self._error: Exception | None = None
        self._flight: Flight | None = None
        if torch.compiler.is_compiling() or function_transforms_active():
            self._arrived = linear(first.tensors, first.call)
        else:
            self._flight = Flight(first.call)
            self._token = self._flight.launch(first.tensors)

    def wait(self) -> T:
        """Return the result, when it is there; every call returns the same.

        Raises:
            RuntimeError: The collective failed, or ran into its timeout.
        """
        if self._error is not None:
            raise self._error
        if not self._result:
            try:
                arrived = self._arrived if self._flight is None else self._flight.arrive(self._token)
                self._result.append(_completed(self._after(*arrived)))
            except Exception as error:
                self._error = error
                raise
        return self._result[0]


def start(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Handle[T]:
    """Start a collective of this package and return at once, so that it overlaps what is computed next.

    In backward the roles change: the gradient's collective is launched where :meth:`Handle.wait` was called,
    and waited for where ``start`` was, so that it overlaps the backward of what was computed between them.

    Args:
        function: A collective of this package, as in ``start(all_gather, x)``.
        args: Its arguments. Tensors must not be changed in place before the result is there.
        kwargs: Its keyword arguments.

    Returns:
        A handle whose :meth:`Handle.wait` returns what ``function(*args, **kwargs)`` would. All ranks must
        start, and wait for, the same collectives in the same order. A handle that is dropped is waited for.

    Raises:
        TypeError: ``function`` is none of this package's collectives; and as the function itself.

    Cost:
        What the function costs. Of those that need two collectives one after the other (MAX, MIN and
        PRODUCT for all ranks) the second one runs in ``wait``. Under ``torch.compile``, where the compiler
        decides when to wait, and under ``torch.func`` it is the function itself.

    Example:
        >>> handle = start(all_gather, keys)  # doctest: +SKIP
        >>> queries = project(x)  # while the keys travel # doctest: +SKIP
        >>> keys = handle.wait()  # doctest: +SKIP
    """
    plan: Any = getattr(function, "plan", None)
    if plan is None:
        raise TypeError(f"start takes a collective of this package, got {function!r}")
    return Handle(plan(*args, **kwargs))
