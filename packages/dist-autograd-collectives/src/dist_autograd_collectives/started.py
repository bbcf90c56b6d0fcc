"""Collectives that are started and waited for separately, forward and backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

import torch
from torch.autograd.graph import saved_tensors_hooks

from dist_autograd_collectives import backend, linear
from dist_autograd_collectives.collective import Call, P, T, as_given
from dist_autograd_collectives.maps import Map, Tensors
from dist_utils.torch_compat import graph_task_id, profiler_range


class Flight:
    """A linear map that is started and waited for separately: two operations for autograd.

    Backward reverses them: the backward of the wait launches the transposed map, and the backward of the
    launch waits for it, after the backward of whatever was computed between the two. Between them only an
    empty tensor is passed on, so that nobody reads data that has not arrived.
    """

    def __init__(self, linear_map: Map, key: int) -> None:
        self.map, self.key = linear_map, key
        self.waiting: backend.Wait | None = None
        """Waits for what runs, until somebody does. Its result is not kept as long as the graph."""
        self.backwards: dict[int, Flight | Tensors] = {}
        """By the backward pass that they belong to; results if something transforms or records that."""

    def __del__(self) -> None:
        """Leave what runs to others; never wait, because nobody knows when this runs.

        A checkpoint that has run forward again as far as it must, for example, has started what it does not
        wait for. Gloo's connections would end with it.
        """
        if self.waiting is not None:
            self.map.who.abandoned.append(self.waiting)


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.flight = flight
        ctx.save_for_backward(linear.SAVED)
        with profiler_range(flight.map.range_name + ":start"):
            flight.waiting = backend.start(tensors, flight.map, flight.key)
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        ctx.saved_tensors  # noqa: B018 - makes the checkpoint around it, if there is one, run again now
        backward = ctx.flight.backwards.pop(graph_task_id())
        return None, *(backward if isinstance(backward, tuple) else _Arrive.apply(backward, token))  # type: ignore[no-untyped-call]


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flight: Flight, token: torch.Tensor) -> Tensors:  # noqa: ARG004 - for autograd
        ctx.flight = flight
        wait, flight.waiting = flight.waiting, None
        if wait is None:
            title = flight.map.title
            raise RuntimeError(f"{title} was waited for before, and that wait has failed or has not ended")
        with profiler_range(flight.map.range_name + ":wait"):
            return backend.finish(wait, flight.map)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        flight, number, traced = ctx.flight, graph_task_id(), linear.is_traced()
        transposed = flight.map.transposed
        # One that a pass left behind, because it raised in between, is never waited for.
        if traced or linear.has_batch(cotangents):
            flight.backwards[number] = linear.apply(cotangents, transposed, flight.key, is_traced=traced)
            return None, cotangents[0].new_empty(0)
        flight.backwards[number] = backward = Flight(transposed, flight.key)
        return None, _Launch.apply(backward, *cotangents)  # type: ignore[no-untyped-call]


class Handle(Generic[T]):
    """A running collective, returned by :func:`start`."""

    def __init__(self, call: Call[T]) -> None:
        self._call = call
        self._result: list[T] = []
        self._with_gradients = torch.is_grad_enabled()
        self._loses_gradients = not self._with_gradients and any(x.requires_grad for x in call.tensors)
        if call.is_traced or linear.has_batch(call.tensors):
            self._result.append(call.finish(call.tensors, call.plan.steps))
            return
        self._lock = threading.RLock()
        prepare, linear_map = call.plan.steps[0]
        self._flight = Flight(linear_map, call.key)
        self._token = _Launch.apply(self._flight, *prepare(call.tensors))  # type: ignore[no-untyped-call]
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
            linear.outside_transforms(),
            torch.inference_mode(False),  # Dynamo takes no keyword
            torch.set_grad_enabled(self._with_gradients),
            saved_tensors_hooks(as_given, as_given),
        ):
            arrived = _Arrive.apply(self._flight, self._token)  # type: ignore[no-untyped-call]
            return self._call.finish(arrived, self._call.plan.steps[1:])


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
        start, and wait for, the same collectives in the same order. It may be waited for several times, also
        inside a checkpoint of either kind. What a dropped handle has sent and not received is waited for by
        the group's next collective, never when the handle is freed.

    Raises:
        TypeError: ``function`` is not a collective of this package; and what the function itself raises.
        NotImplementedError: A tensor has a tangent of ``torch.autograd.forward_ad``: call the function
            itself.

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
