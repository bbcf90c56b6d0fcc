"""The linear maps, each with its transpose: every gradient in this package consists of them.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another one of :data:`Kind`, whose transpose is the first one again. So one
autograd function gives gradients of any order. Nonlinear collectives are composed of these and of torch's own
operations.
"""

from __future__ import annotations

from typing import Any

import torch

from dist_autograd_collectives import backend, transforms
from dist_autograd_collectives.backend import Running
from dist_autograd_collectives.maps import Map, Tensors
from dist_autograd_collectives.transforms import has_batch, in_forward_mode, is_traced
from dist_utils.torch_compat import graph_task_id, profiler_range


def linear(tensors: Tensors, linear_map: Map, key: int, *, is_traced: bool) -> Tensors:
    """Apply a linear map, seen by autograd and by whatever transforms or traces.

    Args:
        tensors: What the map takes.
        linear_map: The map.
        key: What tells its messages from those of the group's other calls.
        is_traced: Whether something records or transforms the call.
    """
    # torch.compile may trace this part of a wait for what was started outside.
    if is_traced or torch.compiler.is_compiling() or has_batch(tensors):
        return transforms.apply(tensors, linear_map, key)
    results: Tensors = _Linear.apply(linear_map, key, *tensors)  # type: ignore[no-untyped-call]
    return results


_SAVED = torch.empty(0)
"""Saved for backward instead of a value, of which none is needed: a checkpoint reruns only what precedes the
last saved tensor, and if ranks saved different ones, not all of them would come back to the collective."""


def _come_back(ctx: Any) -> None:
    """Make the checkpoint around a collective, if there is one, rerun it now."""
    ctx.saved_tensors  # noqa: B018 - reading them does


def _dense(cotangents: Tensors) -> Tensors:
    """Return the cotangents, sparse ones as dense tensors."""
    return tuple([x if x.layout is torch.strided else x.to_dense() for x in cotangents])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear_map: Map, key: int, *tensors: torch.Tensor) -> Tensors:
        ctx.map, ctx.key = linear_map, key
        ctx.save_for_backward(_SAVED)
        return backend.run(tensors, linear_map, key)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        _come_back(ctx)
        # Even if this rank needs no gradient, the others wait for it.
        cotangents, transposed = _dense(cotangents), ctx.map.transposed
        traced = is_traced()
        if traced or torch.is_grad_enabled() or in_forward_mode() or has_batch(cotangents):
            return None, None, *linear(cotangents, transposed, ctx.key, is_traced=traced)
        return None, None, *backend.run(cotangents, transposed, ctx.key)

    @staticmethod
    def jvp(ctx: Any, _: None, __: None, *tangents: torch.Tensor) -> Tensors:
        return linear(tangents, ctx.map, ctx.key, is_traced=is_traced())


class Flight:
    """A linear map that is started and waited for separately: two operations for autograd.

    Backward reverses them: the backward of the wait launches the transposed map, and the backward of the
    launch waits for it, after the backward of whatever was computed between the two. Between them only an
    empty tensor is passed on, so that nobody reads data that has not arrived.
    """

    def __init__(self, linear_map: Map, key: int) -> None:
        self.map, self.key = linear_map, key
        self.backwards: dict[int, Flight] = {}  # by the backward pass that they belong to
        self.running: Running
        """What runs, until it is waited for. Its result is not kept as long as the graph."""
        self._traced: Tensors | None = None
        """The results, if something transforms or records them: nothing is in flight then."""

    def launch(self, tensors: Tensors) -> torch.Tensor:
        """Start the map; return the token for :meth:`arrive`."""
        traced = is_traced()
        if traced or has_batch(tensors):
            self._traced = linear(tensors, self.map, self.key, is_traced=traced)
            return tensors[0].new_empty(0)
        token: torch.Tensor = _Launch.apply(self, *tensors)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, token: torch.Tensor) -> Tensors:
        """Wait for the result; may be called once."""
        if self._traced is not None:
            return self._traced
        results: Tensors = _Arrive.apply(self, token)  # type: ignore[no-untyped-call]
        return results


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        ctx.save_for_backward(_SAVED)
        with profiler_range(flight.map.range_name + ":start"):
            flight.running = Running(tensors, flight.map, flight.key)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        _come_back(ctx)
        flight: Flight = ctx.flight
        return None, *flight.backwards.pop(graph_task_id()).arrive(token)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: torch.Tensor) -> Tensors:  # noqa: ARG004 - for autograd
        ctx.flight = flight
        with profiler_range(flight.map.range_name + ":wait"):
            return flight.running.wait()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        flight: Flight = ctx.flight
        backward = Flight(flight.map.transposed, flight.key)
        # One that a pass left behind, because it raised in between, is never waited for.
        flight.backwards[graph_task_id()] = backward
        return None, backward.launch(_dense(cotangents))
