"""What a collective function consists of: something to send, how, and what is made of what arrives."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch

from dist_autograd_collectives.agreement import problems_told
from dist_autograd_collectives.calls import Call, Tensors
from dist_autograd_collectives.linear import linear

__all__ = ["Step", "collective", "completed"]

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
        return completed(first)

    def planned(*args: P.args, **kwargs: P.kwargs) -> Step[T]:
        if torch.compiler.is_compiling():
            return plan(*args, **kwargs)
        given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}  # whatever they are
        with problems_told(given.get("check"), given.get("group")):
            return plan(*args, **kwargs)

    signature = inspect.signature(plan)
    names = list(signature.parameters)
    result = str(signature.return_annotation).removeprefix("Step[").removesuffix("]")
    run.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    run.__annotations__ = {**plan.__annotations__, "return": result}
    run.plan = planned  # type: ignore[attr-defined]
    return run


def completed(result: T | Step[T]) -> T:
    """Take all steps that are left."""
    while isinstance(result, Step):
        result = result.after(*linear(result.tensors, result.call))
    return result
