"""The steps of a collective function: tensors to send, how to send them, and how to use the result."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dist_autograd_collectives.calls import Call, Tensors, numbered
from dist_autograd_collectives.compared_calls import is_wanted, report_problems
from dist_autograd_collectives.linear import linear
from dist_autograd_collectives.local import needs_others

__all__ = ["Step", "collective", "completed"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Step(Generic[T]):
    """One linear collective on the way to a result.

    Attributes:
        tensors: The tensors that this rank sends.
        call: The collective that sends them.
        after: Turns what this rank receives into the result, or into the next step.
    """

    tensors: Tensors
    call: Call
    after: Callable[..., T | Step[T]]


def collective(plan: Callable[P, Step[T]]) -> Callable[P, T]:
    """Turn a function that returns its first step into a public function that runs all steps."""

    @functools.wraps(plan)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        step = planned(*args, **kwargs)
        first: T | Step[T] = step
        return completed(first, step.call.number)

    def planned(*args: P.args, **kwargs: P.kwargs) -> Step[T]:
        if torch.compiler.is_compiling():
            return plan(*args, **kwargs)
        options: dict[str, Any] = {**kwargs}
        options["check"] = is_wanted(options.get("check"))  # the environment is read once per call
        if options["check"]:
            given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}  # not checked yet
            with report_problems(given.get("group")):
                first = plan(*args, **options)
        else:
            first = plan(*args, **options)
        if needs_others(first.call) or _backward_needs_others(first):
            first.call = numbered(first.call)
        return first

    signature = inspect.signature(plan)
    names = list(signature.parameters)
    result = str(signature.return_annotation).removeprefix("Step[").removesuffix("]")
    run.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**plan.__annotations__, "return": result}
    run.plan = planned  # type: ignore[attr-defined]
    return run


def _backward_needs_others(step: Step[Any]) -> bool:
    """Return whether the gradient of a local step is a collective; if not, a rank may run it alone."""
    differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in step.tensors)
    return differentiable and needs_others(step.call.transposed())


def completed(result: T | Step[T], number: int) -> T:
    """Run the remaining steps of the call with this number."""
    while isinstance(result, Step):
        call = result.call if result.call.number == number else result.call._replace(number=number)
        result = result.after(*linear(result.tensors, call))
    return result
