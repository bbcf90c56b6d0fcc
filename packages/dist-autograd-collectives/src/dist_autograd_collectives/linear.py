"""The linear collectives, each with its transpose: what every gradient in this package is made of.

A collective that moves and adds numbers is a linear map of all ranks' inputs to all ranks' outputs. Its
gradient is the transposed map, another collective of this list, and the transpose of that is itself again.
So gradients of any order come from one autograd function, and nonlinear collectives get theirs by being put
together from these and from torch's own operations.
"""

from __future__ import annotations

from typing import Any

import torch

from dist_autograd_collectives import eager, traced
from dist_autograd_collectives.calls import Call, Wait

__all__ = ["CollectiveError", "Flight", "linear"]

_TRANSPOSES = {
    # The total loss is the sum of all ranks' losses.
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "exchange": "exchange",
    "broadcast": "reduce",
    "reduce": "broadcast",
    "gather": "scatter",
    "scatter": "gather",
    # The loss is one number that all ranks compute alike: nothing is added up over them.
    "replicated all_reduce": "copy",
    "copy": "replicated all_reduce",
    "replicated all_gather": "own part",
    "own part": "replicated all_gather",
    "replicated broadcast": "own if root",
    "own if root": "replicated broadcast",
}


class CollectiveError(RuntimeError):
    """The collective that is another one's backward failed: most often other ranks never came to it."""


def linear(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Run a linear collective that autograd sees."""
    function = _Collective if torch.compiler.is_compiling() else _CollectiveWithForwardMode
    result: torch.Tensor = function.apply(tensor, call)  # type: ignore[no-untyped-call]
    return result


class Flight:
    """A linear collective between its launch and its arrival, for autograd two operations.

    Backward runs them the other way round: the arrival's launches the transposed collective, and what was
    computed between the two runs its backward before the launch's waits for it. Between them only an empty
    tensor is handed on, so that nobody reads what has not arrived.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.wait: Wait | None = None
        self.backwards: Flight | None = None

    def launch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin; return what :meth:`arrive` wants."""
        token: torch.Tensor = _Launch.apply(tensor, self)  # type: ignore[no-untyped-call]
        return token

    def arrive(self, token: torch.Tensor) -> torch.Tensor:
        """Wait for the result."""
        result: torch.Tensor = _Arrive.apply(token, self)  # type: ignore[no-untyped-call]
        return result

    def take(self) -> Wait:
        """Return what waits for the result, which may be done once."""
        wait, self.wait = self.wait, None
        if wait is None:
            raise RuntimeError(f"{self.call.title} was waited for twice, or its backward ran in two threads")
        return wait

    def __del__(self) -> None:
        """Wait for what nobody waited for: other ranks' messages must not be left lying."""
        if self.wait is not None:
            self.wait()


def _begin(tensor: torch.Tensor, call: Call) -> Wait:
    """Start a collective on this rank's tensor."""
    x = tensor.contiguous()
    name = call.kind.removeprefix("replicated ")
    if name == "own part":
        result = x.tensor_split(call.who.size)[call.who.rank].clone()
    elif name == "own if root" and call.who.rank != call.root:
        result = torch.zeros_like(x)
    elif name in ("copy", "own if root") or call.who.size == 1:
        result = x.clone()
    else:
        begin = traced.begin if torch.compiler.is_compiling() else eager.begin
        return begin(name, x, call)
    return lambda: result


def _transposed(call: Call) -> Call:
    return call._replace(
        kind=_TRANSPOSES[call.kind], input_splits=call.output_splits, output_splits=call.input_splits
    )


def _explained(error: RuntimeError, call: Call) -> CollectiveError:
    return CollectiveError(
        f"the backward of {call.title} failed on rank {call.who.rank} of {call.who.size} in its group. If other "
        "ranks did not come to it: does every rank use its result (see connect), and does every rank's tensor "
        f"need a gradient (see anchor=True)? The cause: {error}"
    )


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, call: Call) -> torch.Tensor:
        return _begin(tensor, call)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        _, ctx.call = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        # Even if this rank needs no gradient: the others wait for it.
        return linear(cotangent, _transposed(ctx.call)), None


class _CollectiveWithForwardMode(_Collective):
    """The same, with what ``torch.compile`` refuses to trace."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        try:
            return _Collective.backward(ctx, cotangent)
        except CollectiveError:
            raise
        except RuntimeError as error:
            raise _explained(error, ctx.call) from error

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, *_: Any) -> torch.Tensor:
        return linear(tangent, ctx.call)

    @staticmethod
    def vmap(
        info: Any,  # noqa: ARG004 - torch's signature
        in_dims: tuple[int, ...],
        tensor: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, int]:
        return linear(tensor.movedim(in_dims[0], -1), call), tensor.ndim - 1


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(tensor: torch.Tensor, flight: Flight) -> torch.Tensor:
        flight.wait = _begin(tensor, flight.call)
        return tensor.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        _, ctx.flight = inputs

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        flight: Flight = ctx.flight
        backwards, flight.backwards = flight.backwards, None
        if backwards is None:
            raise RuntimeError(f"the backward of {flight.call.title} runs in two threads at once")
        try:
            return backwards.arrive(token), None
        except RuntimeError as error:
            raise _explained(error, flight.call) from error


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(token: torch.Tensor, flight: Flight) -> torch.Tensor:  # noqa: ARG004
        return flight.take()()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG004
        _, ctx.flight = inputs

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:
        flight: Flight = ctx.flight
        flight.backwards = Flight(_transposed(flight.call))
        return flight.backwards.launch(cotangent), None
