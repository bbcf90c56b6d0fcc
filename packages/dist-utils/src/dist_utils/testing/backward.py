"""Calls in the middle of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["call_in_backward"]


def call_in_backward(x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
    """Return ``x``; when its gradient is computed, ``call()`` comes first.

    For tests of a backward pass that raises, ends its process or inspects something halfway.

    Args:
        x: Any tensor. If it needs no gradient, nothing is called.
        call: Called in the thread that runs the backward pass; what it raises, ``backward()`` raises.

    Returns:
        A copy.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> call_in_backward(x, lambda: print("computing")).backward()
        computing
    """
    result: torch.Tensor = _CallInBackward.apply(x, call)  # type: ignore[no-untyped-call]
    return result


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.call()
        return gradient, None
