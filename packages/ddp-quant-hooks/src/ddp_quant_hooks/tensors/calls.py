"""What all calls on plain tensors share: checks, a step, agreement, and waiting or a future."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ddp_quant_hooks.feedback.residuals import Key
from ddp_quant_hooks.feedback.step import value_count
from ddp_quant_hooks.states import QuantizedAllreduceState
from dist_utils import torch_compat
from dist_utils.comm_hooks import checked_operation, completed_future, failed_future, joined_future

Tensors: TypeAlias = torch.Tensor | Sequence[torch.Tensor]
Future: TypeAlias = torch.futures.Future[Any]
P = ParamSpec("P")
R = TypeVar("R")

_thread = threading.local()
"""``completes_calls`` is set on threads of states. Calls from callbacks there fall between the caller's own
calls, at a place that may differ between ranks."""


_shared_state = QuantizedAllreduceState()
"""The state of calls without a state: WORLD, 8 bits, no error feedback."""


def outside_graphs(fn: Callable[P, R]) -> Callable[P, R]:
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


def check_state(name: str, group: QuantizedAllreduceState | None) -> QuantizedAllreduceState:
    """Return the state of a call.

    Raises:
        TypeError: ``group`` is not a state.
        RuntimeError: The call is made on a state's thread.
    """
    state = _shared_state if group is None else group
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


class Call:
    """A call on plain tensors: a part of a step, on which all ranks agree before it is sent.

    Jobs must not keep it, as it has the state, whose group would end on the worker's own thread.

    Args:
        name: The name of the function.
        state: Its state.
        tensors: What it takes, checked.
        op: What the user wants to be computed.
        key: Names the values; ``None``: no name.

    Raises:
        TypeError: ``key`` is not a string, or ``op`` no operation.
        ValueError: The operation is another one than sum and mean; the key is missing but needed, or was used
            in this step, or for another length; or the tensors are on several accelerators.
        RuntimeError: The call is captured in a CUDA graph, and has something to decide.

    Attributes:
        state: As given.
        tensors: As given.
        mean: Whether the mean is wanted, and not the sum.
        step: The step that the call belongs to.
        with_feedback: Whether residuals are kept.
        label: A number for what the call does, identical in every process. Its messages have it for a tag, so
            that a rank that makes another call does not take them for its own.
    """

    def __init__(
        self,
        name: str,
        state: QuantizedAllreduceState,
        tensors: Sequence[torch.Tensor],
        op: Any,
        key: str | None,
    ) -> None:
        if key is not None and not isinstance(key, str):
            raise TypeError(f"{name}: key must be a string, got {type(key).__name__}")
        self.state, self.tensors, self.mean = state, tensors, checked_operation(name, op)
        self.with_feedback = state.feedback.wanted
        self.label = zlib.crc32(f"{name} {self.mean} {key!r}".encode(errors="surrogatepass"))
        self._name, self._key = name, key
        accelerators = {one.device for one in tensors if one.numel() and one.device.type != "cpu"}
        if len(accelerators) > 1:
            raise ValueError(
                f"{name}: the tensors are on {sorted(map(str, accelerators))}: call once for each"
            )
        names: list[str] = []
        if self.with_feedback:
            if key is None:
                raise ValueError(
                    f"{name}: with error feedback a key must name these values, so that the next step finds "
                    "their residuals"
                )
            names = [*map(self._name_of, range(len(tensors)))]
            for one, tensor in zip(names, tensors, strict=True):
                state.feedback.require_length(one, value_count(tensor))
            names.append(key)
        for tensor in tensors:
            state.refuse_capture(tensor)
        self.step = state.feedback.begin_tensors()
        self.step.use([*dict.fromkeys(names)])

    def key_of(self, number: int) -> Key:
        """Return what the residuals of a tensor belong to."""
        tensor = self.tensors[number]
        if not self.with_feedback:
            return Key.of("", tensor)
        return self.state.feedback.key_of(self._name_of(number), tensor)

    def run(self, start: Callable[[], list[Future]], result: Tensors | None) -> Future | None:
        """Let the ranks agree, start the call, and wait for it unless there is a ``result`` for a future."""
        state, filled = self.state, [tensor for tensor in self.tensors if tensor.numel()]
        keys = [Key.of("", tensor) for tensor in filled]
        terms = {"op": "AVG" if self.mean else "SUM", "key": self._key, **state.average.terms_of(keys)}
        worker = state.worker
        like = filled[0] if filled else torch.empty(0)
        started: list[Future] = []
        # Tensors made here live on and are written elsewhere, so they must not be of inference mode.
        with torch_compat.profiler_range(f"ddp_quant_hooks.{self._name}"), torch.inference_mode(False):
            try:
                if filled and state.process_group.size() > 1:
                    with self.step.outcome.watch():
                        state.require_same_call(self._name, terms, filled)
                        started = [future.then(self.step.outcome.of) for future in start()]
                if result is None:
                    for future in started:
                        future.wait()
                    return None
            except (RuntimeError, MemoryError) as error:
                worker.fail(error)  # the peers hear of it if they have a private group
                if result is not None:
                    return failed_future(error, like)
                raise
        return _future_of_all(started, filled, result)

    def _name_of(self, number: int) -> str:
        """Return the name under which the residuals of a tensor are kept."""
        return str(self._key) if len(self.tensors) == 1 else f"{self._key}[{number}]"


def _future_of_all(started: list[Future], tensors: Sequence[torch.Tensor], result: Tensors) -> Future:
    device = next((one.device for one in tensors if one.device.type != "cpu"), torch.device("cpu"))
    parts = started or [completed_future(torch.empty(0, device=device))]
    caller = threading.get_ident()

    def last(done: Future) -> Tensors:
        if threading.get_ident() != caller:
            _thread.completes_calls = True  # before the caller's own callbacks run here
        done.value()  # raises what went wrong
        return result

    return joined_future(parts, result, device).then(last)
