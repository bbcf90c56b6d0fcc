"""What all calls on plain tensors share: checks, a step, agreement, and waiting or a future."""

from __future__ import annotations

import functools
import threading
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from ddp_quant_hooks.feedback import Key, Step, value_count
from ddp_quant_hooks.states import QuantizedAllreduceState
from dist_utils import torch_compat
from dist_utils.comm_hooks import completed_future, failed_future, joined_future

__all__ = [
    "Future",
    "Tensors",
    "begin",
    "checked_state",
    "keys_of",
    "label_of",
    "never_traced",
    "run",
]

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Future: TypeAlias = torch.futures.Future[Any]
P = ParamSpec("P")
R = TypeVar("R")

_thread = threading.local()
"""``completes_calls`` is set on threads of states. Calls from callbacks there fall between the caller's own
calls, at a place that may differ between ranks."""


class DefaultState(QuantizedAllreduceState):
    """The state of calls without a state: WORLD, 8 bits, no error feedback.

    Nobody can close it after an error, so it closes itself when a call has raised one here, which is the same
    call on every rank. The error of a future may become known at a different call on each rank.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
        self._calls_before: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()

    def count_call(self) -> None:
        """Count a call that all ranks have agreed on."""
        self._calls[self.process_group] = self._calls.get(self.process_group, 0) + 1

    def close_after_error(self) -> None:
        """Let the next call make a fresh start if the worker has an error."""
        if self._worker is not None and self._worker.error is not None:
            self.close()
            self._calls_before = self._calls.copy()

    def terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks, by name."""
        # If only one rank had the error of a call, the next calls of the ranks would not match.
        before = self._calls_before.get(self.process_group, 0)
        return {**super().terms(), "calls without a state before the last error": before}


_default_state = DefaultState()


def never_traced(fn: Callable[P, R]) -> Callable[P, R]:
    """Return a function that ``torch.compile`` runs as it is, between two graphs.

    Like ``torch.compiler.disable``, which would import the compiler here, for seconds.
    """

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            untraced: Callable[P, R] = torch.compiler.disable(fn)  # type: ignore[no-untyped-call]
            return untraced(*args, **kwargs)
        return fn(*args, **kwargs)

    return call


def checked_state(name: str, group: QuantizedAllreduceState | None) -> QuantizedAllreduceState:
    """Return the state of a call.

    Raises:
        TypeError: ``group`` is not a state.
        RuntimeError: The call is made on a state's thread.
    """
    state = _default_state if group is None else group
    if not isinstance(state, QuantizedAllreduceState):
        raise TypeError(
            f"{name}: group must be a QuantizedAllreduceState, which is made once for a group and kept, or "
            f"None for WORLD, got {type(state).__name__}"
        )
    if getattr(_thread, "completes_calls", False) or state.worker.runs_this_thread():
        raise RuntimeError(
            f"{name} in a callback of another call's future, where the order of calls may differ between "
            "ranks: wait for that future, then call"
        )
    return state


def begin(
    name: str, state: QuantizedAllreduceState, tensors: Sequence[torch.Tensor], key: str | None
) -> Step:
    """Return the step that a call belongs to.

    Raises:
        TypeError: ``key`` is not a string.
        ValueError: It is missing but needed, it was used in this step, or for another length.
        RuntimeError: The call is captured in a CUDA graph, and has something to decide.
    """
    if key is not None and not isinstance(key, str):
        raise TypeError(f"{name}: key must be a string, got {type(key).__name__}")
    accelerators = {tensor.device for tensor in tensors if tensor.numel() and tensor.device.type != "cpu"}
    if len(accelerators) > 1:
        raise ValueError(f"{name}: the tensors are on {sorted(map(str, accelerators))}: call once for each")
    names: list[str] = []
    if state.feedback.wanted:
        if key is None:
            raise ValueError(
                f"{name}: with error feedback a key must name these values, so that the next step finds "
                "their residuals"
            )
        names = names_of(key, tensors)
        for one, tensor in zip(names, tensors, strict=True):
            state.feedback.require_length(one, value_count(tensor))
        names.append(key)
    for tensor in tensors:
        state.refuse_capture(tensor)
    step = state.feedback.begin_tensors()
    step.use([*dict.fromkeys(names)])
    return step


def run(
    name: str,
    state: QuantizedAllreduceState,
    step: Step,
    tensors: Sequence[torch.Tensor],
    terms: Mapping[str, object],
    start: Callable[[], list[Future]],
    result: Tensors | None,
) -> Future | None:
    """Agree on a call of a step, start it, and wait for it unless there is a ``result`` for a future."""
    filled = [tensor for tensor in tensors if tensor.numel()]
    like = filled[0] if filled else torch.empty(0)
    started: list[Future] = []
    # Tensors made here live on and are written elsewhere, so they must not be of inference mode.
    with torch_compat.profiler_range(f"ddp_quant_hooks.{name}"), torch.inference_mode(False):
        try:
            if filled and state.process_group.size() > 1:
                with step.outcome.watching():
                    state.require_same_call(name, terms, filled)
                    if isinstance(state, DefaultState):
                        state.count_call()
                    started = [future.then(step.outcome.of) for future in start()]
            if result is None:
                for future in started:
                    future.wait()
                return None
        except RuntimeError as error:
            if result is not None:
                return failed_future(error, like)
            if isinstance(state, DefaultState):
                state.close_after_error()
            raise
    return _future_of_all(started, filled, result)


def _future_of_all(started: list[Future], tensors: Sequence[torch.Tensor], result: Tensors) -> Future:
    device = next((one.device for one in tensors if one.device.type != "cpu"), torch.device("cpu"))
    if not started:
        return completed_future(torch.empty(0, device=device)).then(lambda _: result)
    caller = threading.get_ident()

    def last(done: Future) -> Tensors:
        if threading.get_ident() != caller:
            _thread.completes_calls = True  # before the caller's own callbacks run here
        done.value()  # raises what went wrong
        return result

    return joined_future(started, result, device).then(last)


def names_of(key: str, tensors: Sequence[torch.Tensor]) -> list[str]:
    """Return the names under which the residuals of a call's tensors are kept."""
    return [key] if len(tensors) == 1 else [f"{key}[{number}]" for number in range(len(tensors))]


def keys_of(state: QuantizedAllreduceState, key: str | None, tensors: Sequence[torch.Tensor]) -> list[Key]:
    """Return what the residuals of a call's tensors belong to."""
    counts = [value_count(tensor) for tensor in tensors]
    if key is None or not state.feedback.wanted:
        return [Key("", count) for count in counts]
    named = zip(names_of(key, tensors), counts, strict=True)
    return [state.feedback.key(name, count) for name, count in named]


def label_of(name: str, key: str | None, *, mean: bool) -> int:
    """Return a number for what a call does, identical in every process.

    Its messages have it for a tag, so that a rank that makes another call does not take them for its own.
    """
    return zlib.crc32(f"{name} {mean} {key!r}".encode(errors="surrogatepass"))
