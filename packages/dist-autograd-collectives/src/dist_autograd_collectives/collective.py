"""A call of a public function, from its arguments to its result, which may be waited for later.

A public function checks its arguments, prepares the call, and returns its first :class:`Step`: a linear map,
its tensors, and what is made of what arrives. :func:`collective` runs the steps; :func:`start` stops before
the first wait. (Generators would read even better, but ``torch.compile`` of torch 2.6 cannot trace them.)
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, cast
from zlib import crc32

import torch
from torch.autograd.graph import saved_tensors_hooks

from dist_autograd_collectives.arguments import check_own_part
from dist_autograd_collectives.backend import CollectiveError
from dist_autograd_collectives.calls import Call, Convention, Map, Members, Tensors, hash_of_names, members
from dist_autograd_collectives.linear import Flight, linear
from dist_autograd_collectives.transforms import is_recorded, is_traced, outside_transforms
from dist_utils import AgreementError, TensorMismatchError, resolve_group
from dist_utils.process_groups import TensorClaim, all_gather_plain, require_same_tensors, same_error
from dist_utils.torch_compat import transformed_as

P = ParamSpec("P")
T = TypeVar("T")

_VARIABLE = "DIST_AUTOGRAD_CHECK"


def prepare(
    title: str,
    who: Members,
    tensors: Sequence[torch.Tensor],
    anchor: bool,
    check: object,
    *,
    terms: str = "",
    grad: Convention = "sum",
    uneven_dim: int | None = None,
    shape: Sequence[int] | None = None,
    splits: tuple[Sequence[int], Sequence[int]] | None = None,
) -> tuple[Call, list[torch.Tensor]]:
    """Return the call, and the tensors that take part in it; raises on every rank if the ranks' calls differ.

    The last thing that a function does before it communicates: what one rank alone can get wrong comes first.

    Args:
        title: The function, and the operation, for errors and profilers.
        who: The ranks.
        tensors: This rank's tensors, as the caller gave them.
        anchor: Whether the backward of the call runs on this rank even if no tensor needs a gradient.
        check: The :class:`Comparison`, if ranks compare their calls.
        terms: Every argument besides the title and the tensors that must be equal.
        grad: The convention, where the two differ.
        uneven_dim: A dimension whose length may differ.
        shape: What the first tensor stands for, if it has another shape; the other tensors are not compared.
        splits: How many rows this rank sends to each rank, and how many it expects.
    """
    tensors = _anchor(tensors, anchor)
    if splits is not None:
        check_own_part(*splits, who)
    recorded, needs_gradient = is_recorded(), any(tensor.requires_grad for tensor in tensors)
    forms = [tuple(shape)] if shape is not None else [tuple(tensor.shape) for tensor in tensors]
    if uneven_dim is not None:
        forms = [(*form[:uneven_dim], -1, *form[uneven_dim + 1 :]) for form in forms]
    if isinstance(check, Comparison) and not recorded:
        # If one of them does, backward runs, for all of them.
        described = [_description(*pair, needs_gradient) for pair in zip(tensors, forms, strict=False)]
        check.require_same(who, TensorClaim([("", one) for one in described], f"{title}{terms}, {grad}"))
        if splits is not None:
            _compare_splits(who, *splits)
    form = 0
    if not recorded:  # symbolic shapes of a compiler have no hash
        dtypes = hash_of_names(*{tensor.dtype for tensor in tensors})  # a mean may be sent in another one
        # Not hash_of_names, which keeps all that it has seen: sizes may be others in every step.
        form = hash((tuple(forms), dtypes, crc32(f"{terms}, {grad}".encode())))
    return Call.next(title, who, grad, form, needs_gradient), tensors


def _anchor(tensors: Sequence[torch.Tensor], anchor: bool) -> list[torch.Tensor]:
    """Return the tensors; with ``anchor``, one without a gradient is replaced by one that needs one."""
    if not isinstance(anchor, bool):
        raise TypeError(f"anchor must be True or False, got {type(anchor).__name__}")
    if not anchor:
        return list(tensors)
    if is_traced():  # refused on all ranks
        raise ValueError("anchor=True works neither under torch.compile nor under torch.func")
    return [
        tensor.detach().requires_grad_()
        if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
        else tensor
        for tensor in tensors
    ]


def _description(tensor: torch.Tensor, form: Sequence[int], requires_grad: bool) -> str:
    lengths = ", ".join("any" if length < 0 else str(length) for length in form)
    needs = "a gradient" if requires_grad and torch.is_grad_enabled() else "no gradient"
    what = f"shape ({lengths}), {tensor.dtype} on {tensor.device.type}, which needs {needs}"
    transformed = transformed_as(tensor)
    return f"{what}, {transformed}" if transformed else what


class Comparison:
    """How the ranks compare their calls, if they do; each function takes it for its ``check``.

    Attributes:
        is_due: Whether it is still to come: until then the others can be told what goes wrong on this rank.
    """

    def __init__(self) -> None:
        self.is_due = True

    def require_same(self, who: Members, claim: TensorClaim, problem: Exception | None = None) -> None:
        """Raise on every rank if the ranks claim something else, or one of them has a problem."""
        self.is_due = False
        with outside_transforms():
            try:
                require_same_tensors(resolve_group(who.group), claim, problem)
            except RuntimeError as error:
                if error is problem or isinstance(error, AgreementError):
                    raise
                raise CollectiveError(
                    f"the comparison of check=True failed on rank {who.rank} of {who.size} in the group of "
                    f"{claim.arguments or 'a call with wrong arguments'}: {error} - Do all ranks come to it?"
                ) from error

    def tell(self, problem: Exception, group: Any) -> None:
        """Tell a problem in the group that the caller meant; in WORLD if it gave something that is none."""
        # The comparison raises the problem, as the caller does; nobody waits for a rank outside the group.
        with contextlib.suppress(RuntimeError, ValueError, TensorMismatchError, type(problem)):
            try:
                who = members(group)
            except TypeError:
                who = members(None)
            self.require_same(who, TensorClaim([]), problem)


def _compare_splits(who: Members, outgoing: Sequence[int], incoming: Sequence[int]) -> None:
    """Raise on every rank unless each rank expects from every other as much as that one sends."""
    with outside_transforms():
        everyone = all_gather_plain(who.group, [outgoing, incoming])
    for sender, (sent, _) in enumerate(everyone):
        for receiver, (_, expected) in enumerate(everyone):
            if sent[receiver] != expected[sender]:
                raise TensorMismatchError(
                    f"rank {sender} of the group sends {sent[receiver]} to rank {receiver}, which expects "
                    f"{expected[sender]}"
                )


class Step(Generic[T]):
    """One linear map on the way to a result.

    Attributes:
        tensors: The tensors that this rank sends.
        map: What becomes of them.
        then: Turns what this rank receives into the result, or into the next step.
    """

    def __init__(self, tensors: Tensors, linear_map: Map, then: Callable[..., T | Step[T]]) -> None:
        self.tensors, self.map, self.then = tensors, linear_map, then


def step(linear_map: Map, tensors: Sequence[torch.Tensor], then: Callable[..., T]) -> T:
    """Return a :class:`Step` to the caller's result, into which :func:`collective` turns it.

    Complex tensors go as real and imaginary parts, which every backend supports.
    """
    if not tensors[0].is_complex():
        return cast("T", Step(tuple(tensors), linear_map, then))
    # Not view_as_real, because gradients may come back with any strides.
    real = tuple(torch.stack((tensor.real, tensor.imag), -1) for tensor in tensors)
    whole = lambda *received: then(*(torch.complex(x[..., 0], x[..., 1]) for x in received))  # noqa: E731
    return cast("T", Step(real, linear_map, whole))


def identity(result: torch.Tensor) -> torch.Tensor:
    """Return the received tensor unchanged."""
    return result


def collective(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function that returns its first step a public one, which runs all steps."""
    names = list(inspect.signature(function).parameters)

    def first_step(*args: P.args, **kwargs: P.kwargs) -> T | Step[T]:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        check = kwargs.get("check")
        if check is not None and not isinstance(check, bool):
            raise TypeError(f"check must be True, False or None, got {type(check).__name__}")
        if check is None:
            check = os.environ.get(_VARIABLE, "") not in ("", "0")
        if not check:
            return function(*args, **kwargs)
        comparison = Comparison()
        try:
            return function(*args, **{**kwargs, "check": comparison})  # type: ignore[arg-type]
        except Exception as problem:
            if comparison.is_due:
                given: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
                comparison.tell(problem, given.get("group"))
            raise

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with _without_autocast():
            return _complete(first_step(*args, **kwargs))

    run.first_step = first_step  # type: ignore[attr-defined]
    return run


def _complete(result: T | Step[T]) -> T:
    while isinstance(result, Step):
        result = result.then(*linear(result.tensors, result.map))
    return result


def _without_autocast() -> contextlib.AbstractContextManager[object]:
    """Return a context in which dtypes stay as they are: a rank that pads must not differ from others."""
    compiling = torch.compiler.is_compiling()
    enabled = [] if compiling else [name for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)]
    if not enabled:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


class Handle(Generic[T]):
    """A running collective, returned by :func:`start`."""

    def __init__(self, first: Step[T]) -> None:
        self._title, self._then = first.map.call.title, first.then
        self._result: list[T] = []
        self._error: Exception | None = None
        self._with_gradients = torch.is_grad_enabled()
        self._loses_gradients = not self._with_gradients and first.map.call.needs_gradient
        if is_traced():
            self._result.append(_complete(first.then(*linear(first.tensors, first.map))))
        else:
            self._lock = threading.RLock()
            self._flight = Flight(first.map)
            self._token = self._flight.launch(first.tensors)

    def wait(self) -> T:
        """Wait for the result and return it, the same one every time.

        It has its gradient wherever it is waited for, also in ``torch.no_grad`` and inside a checkpoint, as a
        tensor has that was made where the collective was started.

        Raises:
            RuntimeError: The collective failed, or ran into its timeout. Or it was started without gradients,
                in ``torch.no_grad`` or a checkpoint with ``use_reentrant=True``, and is waited for with
                them: the gradient of its tensors would be lost.
        """
        if self._loses_gradients and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._title} was started without gradients (in torch.no_grad, or in a checkpoint with "
                "use_reentrant=True) from tensors that need one, and is waited for with gradients: start it "
                "with gradients too, or from detached tensors"
            )
        if not self._result:
            with self._lock:
                self._finish_once()
        return self._result[0]

    def _finish_once(self) -> None:
        if self._error is not None:
            raise same_error(self._error)
        if self._result:  # of another thread
            return
        try:
            self._result.append(self._finish())
        except Exception as error:
            self._error = same_error(error)  # without the frames, which hold this handle
            raise
        except BaseException as error:
            self._error = CollectiveError(f"an earlier wait for {self._title} was ended by {error!r}")
            raise

    def _finish(self) -> T:
        """Return the result, in the modes of the start; a checkpoint around it does not see what it saves."""
        with (
            outside_transforms(),
            torch.inference_mode(False),  # Dynamo takes no keyword
            torch.set_grad_enabled(self._with_gradients),
            saved_tensors_hooks(identity, identity),
            _without_autocast(),
        ):
            return _complete(self._then(*self._flight.arrive(self._token)))


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
            start, and wait for, the same collectives in the same order. It may be waited for several times,
            also inside a checkpoint of either kind. What a dropped handle has sent and not received is waited
            for by the group's next collective, never when the handle is freed.

    Raises:
        TypeError: ``function`` is not a collective of this package; and what the function itself raises.

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
    first_step: Any = getattr(function, "first_step", None)
    if first_step is None:
        raise TypeError(f"start takes a collective of this package, got {function!r}")
    with _without_autocast():
        return Handle(first_step(*args, **kwargs))
