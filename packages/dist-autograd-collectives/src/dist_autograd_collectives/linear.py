"""The linear maps, each with its transpose: every gradient in this package consists of them.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another one of :data:`Kind`, whose transpose is the first one again. So one
autograd function gives gradients of any order. Nonlinear collectives are composed of these and of torch's own
operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from dist_autograd_collectives import backend, transforms
from dist_autograd_collectives.arguments import check_tensor
from dist_autograd_collectives.calls import Call, Map, Tensors, Wait
from dist_autograd_collectives.transforms import has_tangent, outside_transforms, takes_operator
from dist_utils.torch_compat import graph_task_id, profiler_range


def linear(tensors: Tensors, linear_map: Map) -> Tensors:
    """Apply a linear map, seen by autograd and by whatever transforms or traces."""
    if takes_operator(tensors):
        return transforms.apply(tensors, linear_map)
    results: Tensors = _Linear.apply(linear_map, *tensors)  # type: ignore[no-untyped-call]
    return results


def exchange_lengths(lengths: Sequence[int], like: torch.Tensor, call: Call) -> tuple[int, ...]:
    """Send each rank a length, and return the lengths that the ranks send to this one."""
    exchange = Map("exchange", call._replace(title=f"{call.title} (sizes)"))
    with outside_transforms():  # nobody differentiates or records them
        own = torch.tensor(lengths, dtype=torch.int64, device=like.device)
        (received,) = backend.begin((own,), exchange)()
    return tuple(received.tolist())


def _run(tensors: Tensors, linear_map: Map) -> Tensors:
    """Apply a map, unseen by autograd."""
    with profiler_range(linear_map.range_name()):
        return backend.begin(tensors, linear_map)()


def _save_something(ctx: Any, like: torch.Tensor) -> None:
    """Make a checkpoint rerun the forward on every rank, though no value is needed.

    A checkpoint reruns only what precedes the last saved tensor; if ranks saved different tensors, not all of
    them would reach the collective.
    """
    ctx.save_for_backward(like.new_empty(0))


def _dense(cotangents: Tensors) -> Tensors:
    """Return the cotangents, sparse ones as dense tensors."""
    return tuple(x if x.layout is torch.strided else x.to_dense() for x in cotangents)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linear_map: Map, *tensors: torch.Tensor) -> Tensors:
        ctx.map = linear_map
        results = _run(tensors, linear_map)
        _save_something(ctx, results[0])
        return results

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        # Even if this rank needs no gradient, the others wait for it.
        cotangents = _dense(cotangents)
        is_seen = torch.is_grad_enabled() or takes_operator(cotangents) or any(map(has_tangent, cotangents))
        apply = linear if is_seen else _run
        return None, *apply(cotangents, ctx.map.transpose())

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> Tensors:
        return linear(tangents, ctx.map)


class Flight:
    """A linear map that is started and waited for separately: two operations for autograd.

    Backward reverses them: the backward of the wait launches the transposed map, and the backward of the
    launch waits for it, after the backward of whatever was computed between the two. Between them only an
    empty tensor is passed on, so that nobody reads data that has not arrived.
    """

    def __init__(self, linear_map: Map) -> None:
        self.map = linear_map
        self.backwards: dict[int, Flight] = {}  # by the backward pass that they belong to
        self.wait: Wait | None = None
        self._traced: Tensors | None = None
        """The results, if something transforms or records them: nothing is in flight then."""

    def launch(self, tensors: Tensors) -> torch.Tensor:
        """Start the map; return the token for :meth:`arrive`."""
        if takes_operator(tensors):
            self._traced = linear(tensors, self.map)
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
        with profiler_range(flight.map.range_name(":start")):
            flight.wait = backend.begin(tensors, flight.map)
        _save_something(ctx, tensors[0])
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018
        flight: Flight = ctx.flight
        return None, *flight.backwards.pop(graph_task_id()).arrive(token)


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: torch.Tensor) -> Tensors:  # noqa: ARG004 - for autograd
        ctx.flight = flight
        with profiler_range(flight.map.range_name(":wait")):
            wait, flight.wait = flight.wait, None  # a result is not kept as long as the graph
            if wait is None:  # in a signal's handler, say, that has interrupted the first wait
                raise RuntimeError(f"{flight.map.call.title} is waited for by this thread already")
            return wait()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        flight: Flight = ctx.flight
        backward = Flight(flight.map.transpose())
        # One that a pass left behind, because it raised in between, is never waited for.
        flight.backwards[graph_task_id()] = backward
        return None, backward.launch(_dense(cotangents))


def connect(loss: torch.Tensor, *outputs: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the loss, made to depend on outputs of collectives that it may not use.

    The backward of a collective is a collective: a rank that does not use an output never takes part, and
    the others wait for it until their timeout. A connected output gets a cotangent of zeros.

    Args:
        loss: Any tensor; its value does not change.
        outputs: Outputs of collectives, floating-point or complex: tensors, or tuples or lists of them.

    Raises:
        TypeError: Something is not a tensor.

    Source:
        ``JoinDummies`` of mpi4torch.

    Example:
        >>> loss = connect(loss_of(mine), theirs)  # doctest: +SKIP
    """
    loss = check_tensor("loss", loss)
    tensors: list[torch.Tensor] = []
    for output in outputs:
        tensors.extend(output if isinstance(output, (tuple, list)) else [cast("torch.Tensor", output)])
    for given in tensors:
        output = check_tensor("each output", given)
        # Empty, so that no infinity and no NaN in the output gets into the loss.
        nothing = output.flatten()[:0].sum()
        loss = loss + (nothing.real if output.is_complex() else nothing).to(loss.dtype)
    return loss
