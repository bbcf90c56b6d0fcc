"""Collectives that are started early and waited for late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import torch

from dist_autograd_collectives.calls import Tensors
from dist_autograd_collectives.linear import Flight, linear
from dist_autograd_collectives.steps import Step, completed
from dist_autograd_collectives.transforms import function_transforms_active
from dist_utils.torch_compat import MissingTorchFeatureError, private, tensor_version

__all__ = ["Handle", "start"]

P = ParamSpec("P")
T = TypeVar("T")


class Handle(Generic[T]):
    """A running collective, returned by :func:`start`."""

    def __init__(self, first: Step[T]) -> None:
        self._title, self._number = first.call.title, first.call.number
        self._after = first.after
        self._mode: tuple[object, ...] = ()
        self._result: list[T] = []
        self._error: Exception | None = None
        self._received: list[tuple[torch.Tensor, int]] = []
        self._flight: Flight | None = None
        self._without_gradient = not torch.is_grad_enabled() and any(x.requires_grad for x in first.tensors)
        if torch.compiler.is_compiling() or function_transforms_active():
            self._arrived = linear(first.tensors, first.call)
        else:
            self._flight = Flight(first.call)
            self._token = self._flight.launch(first.tensors)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"a handle of {self._title} cannot be copied: it belongs to a collective that is running"
        )

    def wait(self) -> T:
        """Wait for the result and return it.

        Every call returns the same tensors unless the mode has changed: with gradients after a call without
        them, or when a checkpoint reruns its function. Then it returns a copy, which has its own part in
        backward, and nothing is communicated again.

        Raises:
            RuntimeError: The collective failed, or ran into its timeout. Or it was started without gradients,
                in ``torch.no_grad`` or a checkpoint with ``use_reentrant=True``, and is waited for with
                them: the gradient of its tensors would be lost. Or a copy is needed, but the result was
                changed in place.
        """
        if self._error is not None:
            raise self._error
        mode = self._mode_now()
        if self._without_gradient and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._title} was started without gradients (in torch.no_grad, or in a checkpoint with "
                "use_reentrant=True) from tensors that need one, and is waited for with gradients: start it "
                "with gradients too, or from detached tensors"
            )
        if not self._result or any(now is not then for now, then in zip(mode, self._mode, strict=True)):
            try:
                arrived = self._arrived if self._flight is None else self._arrive(self._flight)
                self._result[:] = [completed(self._after(*arrived), self._number)]
            except Exception as error:
                self._error = error
                raise
            self._mode = mode
        return self._result[0]

    @staticmethod
    def _mode_now() -> tuple[object, ...]:
        """Return what a result depends on besides the received tensors; compared by identity."""
        if torch.compiler.is_compiling():
            return ()
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), _saved_tensor_hooks()

    def _arrive(self, flight: Flight) -> Tensors:
        return flight.arrive(self._token, self._again if self._received else lambda: self._first(flight))

    def _first(self, flight: Flight) -> Tensors:
        """Wait for the tensors and keep them here, because the flight lives as long as the graph."""
        with torch.inference_mode(False):  # no backward could use inference tensors later
            received = flight.receive()
            self._received = [(x.detach(), _version(x)) for x in received]
        return received

    def _again(self) -> Tensors:
        if any(_version(x) != version for x, version in self._received):
            raise RuntimeError(
                f"the result of {self._title} was changed in place: it cannot be waited for again, "
                "with other gradients or in a checkpoint"
            )
        return tuple(x.clone() for x, _ in self._received)


def _saved_tensor_hooks() -> object:
    """Return the hooks that a tensor saved for backward goes through now; ``None`` if there are none.

    They differ each time a checkpoint runs its function. No public name up to torch 2.15. A torch that cannot
    tell, such as 2.6, counts as one with other hooks at every call.
    """
    try:
        top = private("torch._C._autograd", "_top_saved_tensors_default_hooks", "waiting again")
    except MissingTorchFeatureError:
        return object()
    hooks = top(False)
    return None if hooks is None else hooks[0]


def _version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, if torch counts it."""
    return 0 if tensor.is_inference() else tensor_version(tensor)


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
            start, and wait for, the same collectives in the same order. A dropped handle is waited for before
            it is freed. It may be waited for several times, also inside a checkpoint of either kind.

    Raises:
        TypeError: ``function`` is not a collective of this package; and what the function itself raises.

    Cost:
        The cost of the function. Where that takes two collectives in sequence (MAX, MIN and
        PRODUCT for all ranks), the second one runs in ``wait``. Under ``torch.compile``, where the compiler
        decides when to wait, and under ``torch.func`` it is the function itself. The handle keeps the
        received tensors: drop it after its last ``wait``.

    Example:
        >>> handle = start(all_gather, keys)  # doctest: +SKIP
        >>> queries = project(x)  # while the keys are sent # doctest: +SKIP
        >>> keys = handle.wait()  # doctest: +SKIP
    """
    plan: Any = getattr(function, "plan", None)
    if plan is None:
        raise TypeError(f"start takes a collective of this package, got {function!r}")
    return Handle(plan(*args, **kwargs))
