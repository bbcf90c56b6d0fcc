"""The linear collectives, each with its transpose: every gradient in this package consists of them.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another collective of this list, whose transpose is the first one again.
So one autograd function gives gradients of any order. Nonlinear collectives are composed of these and of
torch's own operations.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dist_autograd_collectives import eager, traced
from dist_autograd_collectives.calls import Call, Tensors, Wait
from dist_autograd_collectives.failures import named
from dist_autograd_collectives.local import local_result, needs_others
from dist_autograd_collectives.transforms import function_transforms_active, is_batched_gradient
from dist_utils.torch_compat import graph_task_id, profiler_range

__all__ = ["Flight", "linear"]


def linear(tensors: Tensors, call: Call) -> Tensors:
    """Run a linear collective that autograd sees."""
    if torch.compiler.is_compiling():
        return traced.linear(tensors, call)
    function = _TransformedCollective if function_transforms_active() else _Collective
    results: Tensors = function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return results


class Flight:
    """A linear collective that is started and waited for separately: two operations for autograd.

    Backward reverses them: the backward of the wait launches the transposed collective, and the backward of
    the launch waits for it, after the backward of whatever was computed between the two. Between them only an
    empty tensor is passed on, so that nobody reads data that has not arrived.

    It may be waited for several times: a checkpoint runs the wait again. Each wait launches a collective of
    its own in backward, and the backward of the launch waits for all of them.
    """

    wait: Wait | None = None

    def __init__(self, call: Call) -> None:
        self.call = call
        self.backwards: list[tuple[int, Flight]] = []  # each with the backward pass that it belongs to

    def begin(self, tensors: Tensors) -> None:
        """Start the collective unseen by autograd; :meth:`receive` waits for it."""
        self.wait = _begin(tensors, self.call)

    def launch(self, tensors: Tensors) -> torch.Tensor:
        """Start the collective; return the token for :meth:`arrive`."""
        token: torch.Tensor = _Launch.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, token: torch.Tensor, receive: Wait | None = None) -> Tensors:
        """Wait for the result, or take one that was received already."""
        results: Tensors = _Arrive.apply(self, receive or self.receive, token)  # type: ignore[no-untyped-call]
        return results

    def receive(self) -> Tensors:
        """Wait for what this rank receives; may be called once."""
        wait, self.wait = self.wait, None
        if wait is None:
            raise RuntimeError(f"{self.call.title} was waited for twice, or its backward ran in two threads")
        return wait()

    def __del__(self) -> None:
        """Wait if nobody did: other ranks' messages must not be left pending."""
        if self.wait is not None:
            self.wait()


def _begin(tensors: Tensors, call: Call) -> Wait:
    """Start a collective on this rank's tensors."""
    if any(map(is_batched_gradient, tensors)):  # torch runs the operator once per gradient of the batch
        batch = traced.linear(tensors, call)
        return lambda: batch
    inputs = tuple(tensor.contiguous().resolve_neg() for tensor in tensors)
    if not needs_others(call):
        results = local_result(inputs, call)
        return lambda: results
    return eager.begin(inputs, call)


def _save_something(ctx: Any, like: torch.Tensor) -> None:
    """Make a checkpoint rerun the forward on every rank, though no value is needed.

    A checkpoint reruns only what precedes the last saved tensor; if ranks saved different tensors, not all of
    them would reach the collective.
    """
    ctx.save_for_backward(like.new_empty(0))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Call, *tensors: torch.Tensor) -> Tensors:
        ctx.call = call
        with profiler_range(call.range_name()):
            results = _begin(tensors, call)()
        _save_something(ctx, results[0])
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        # Even if this rank needs no gradient, the others wait for it.
        with named(ctx.call):
            return None, *linear(cotangents, ctx.call.transposed())

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Tensors:
        return linear(tangents, ctx.call)


class _TransformedCollective(_Collective):
    """The same for ``torch.func``, whose form of autograd function costs 40 microseconds more each way."""

    @staticmethod
    def forward(call: Call, *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        with profiler_range(call.range_name()):
            return _begin(tensors, call)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:  # noqa: ARG004
        ctx.call = inputs[0]

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        call: Call,
        *tensors: torch.Tensor,
    ) -> tuple[Tensors, tuple[int, ...]]:
        # The batch dimension goes last, because parts lie along dimension 0.
        pairs = zip(tensors, in_dims[1:], strict=True)
        batched = tuple(
            x.unsqueeze(-1).expand(*x.shape, info.batch_size) if dim is None else x.movedim(dim, -1)
            for x, dim in pairs
        )
        results = linear(batched, call)
        return results, tuple(result.ndim - 1 for result in results)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        with profiler_range(flight.call.range_name(":start")):
            flight.begin(tensors)
        _save_something(ctx, tensors[0])
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        flight: Flight = ctx.flight
        # Not those of a backward pass that raised before it got here, or that is still running.
        this_pass = graph_task_id()
        backwards = [backward for number, backward in flight.backwards if number == this_pass]
        flight.backwards = [entry for entry in flight.backwards if entry[0] != this_pass]
        if not backwards:
            raise RuntimeError(f"the backward of {flight.call.title} runs in two threads at once")
        with named(flight.call):
            gradients = [backward.arrive(token) for backward in backwards]
            return None, *(functools.reduce(torch.add, parts) for parts in zip(*gradients, strict=True))


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, receive: Wait, token: torch.Tensor) -> Tensors:
        ctx.flight = flight
        _save_something(ctx, token)
        with profiler_range(flight.call.range_name(":wait")):
            return receive()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        flight: Flight = ctx.flight
        backward = Flight(flight.call.transposed())
        flight.backwards.append((graph_task_id(), backward))
        with named(flight.call):
            return None, None, backward.launch(cotangents)
