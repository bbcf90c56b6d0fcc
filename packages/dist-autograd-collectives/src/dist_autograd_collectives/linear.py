"""The linear collectives, each with its transpose: what every gradient in this package is made of.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another collective of this list, and the transpose of that is itself again.
So gradients of any order come from one autograd function, and nonlinear collectives get theirs by being put
together from these and from torch's own operations.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from dist_autograd_collectives import eager, traced
from dist_autograd_collectives.calls import Call, Tensors, Wait
from dist_autograd_collectives.failures import named
from dist_autograd_collectives.local import alone, needs_others
from dist_utils.torch_compat import (
    function_transforms_active,
    graph_task_id,
    is_batched_gradient,
    profiler_range,
)

__all__ = ["Flight", "linear"]


def linear(tensors: Tensors, call: Call) -> Tensors:
    """Run a linear collective that autograd sees."""
    if torch.compiler.is_compiling():
        return traced.linear(tensors, call)
    function = _TransformedCollective if function_transforms_active() else _Collective
    results: Tensors = function.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return results


class Flight:
    """A linear collective between its launch and its arrival, for autograd two operations.

    Backward runs them the other way round: the arrival's launches the transposed collective, and what was
    computed between the two runs its backward before the launch's waits for it. Between them only an empty
    tensor is handed on, so that nobody reads what has not arrived.

    It may arrive several times: a checkpoint runs what waits again. Each arrival launches a collective of its
    own in backward, and what was launched first waits for all of them.
    """

    wait: Wait | None = None

    def __init__(self, call: Call) -> None:
        self.call = call
        self.backwards: list[tuple[int, Flight]] = []  # and which backward pass each belongs to

    def begin(self, tensors: Tensors) -> None:
        """Begin what autograd does not see; :meth:`receive` waits for it."""
        self.wait = _begin(tensors, self.call)

    def launch(self, tensors: Tensors) -> torch.Tensor:
        """Begin; return what :meth:`arrive` wants."""
        token: torch.Tensor = _Launch.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, token: torch.Tensor, receive: Wait | None = None) -> Tensors:
        """Wait for the result, or take what was received already."""
        results: Tensors = _Arrive.apply(self, receive or self.receive, token)  # type: ignore[no-untyped-call]
        return results

    def receive(self) -> Tensors:
        """Wait for what this rank receives, which may be done once."""
        wait, self.wait = self.wait, None
        if wait is None:
            raise RuntimeError(f"{self.call.title} was waited for twice, or its backward ran in two threads")
        return wait()

    def __del__(self) -> None:
        """Wait for what nobody waited for: other ranks' messages must not be left lying."""
        if self.wait is not None:
            self.wait()


def _begin(tensors: Tensors, call: Call) -> Wait:
    """Start a collective on this rank's tensors."""
    if any(map(is_batched_gradient, tensors)):  # of which torch runs the operator once for each
        batch = traced.linear(tensors, call)
        return lambda: batch
    inputs = tuple(tensor.contiguous().resolve_neg() for tensor in tensors)
    if not needs_others(call):
        results = alone(inputs, call)
        return lambda: results
    return eager.begin(inputs, call)


def _save_something(ctx: Any, like: torch.Tensor) -> None:
    """Make a checkpoint run the forward again on every rank, though no value is needed.

    It runs only what comes before something that was saved; ranks that save different things would otherwise
    not all come to the collective.
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
        # Even if this rank needs no gradient: the others wait for it.
        with named(ctx.call):
            return None, *linear(cotangents, ctx.call.transposed())

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Tensors:
        return linear(tangents, ctx.call)


class _TransformedCollective(_Collective):
    """The same for ``torch.func``, whose form of a function costs 40 microseconds more each way."""

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
        # The batch goes last: collectives that have parts have them along dimension 0.
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
        # Not those of a pass that raised before it came here, or that is still on its way.
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
