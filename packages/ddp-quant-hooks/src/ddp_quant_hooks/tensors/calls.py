"""What all calls on plain tensors share: checks, a step, agreement, and waiting or a future."""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from ddp_quant_hooks.feedback.residuals import Key
from ddp_quant_hooks.feedback.step import Step, value_count
from ddp_quant_hooks.states import AveragingState, QuantizedAllreduceState
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


def check_state(name: str, group: AveragingState | None) -> AveragingState:
    """Return the state of a call.

    Raises:
        TypeError: ``group`` is not a state.
        RuntimeError: The call is made on a state's thread.
    """
    state = _shared_state if group is None else group
    if not isinstance(state, AveragingState):
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


@dataclass(frozen=True)
class Call:
    """A call on plain tensors that is part of a step, which it has begun.

    Jobs must not keep it, as it has the state, whose group would end on the worker's own thread.

    Attributes:
        name: The name of the function.
        state: Its state.
        tensors: What it averages, checked.
        owners: What the residuals of each tensor belong to.
        mean: Whether the mean is wanted, and not the sum.
        key: What names the values, for comparison between the ranks.
        step: The step that the call belongs to.
    """

    name: str
    state: AveragingState
    tensors: Sequence[torch.Tensor]
    owners: Sequence[Key]
    mean: bool
    key: str | None
    step: Step

    @property
    def label(self) -> int:
        """A number for what the call does, identical in every process.

        Its messages have it for a tag, so that a rank that makes another call does not take them for its own.
        """
        text = f"{self.name} {self.mean} {self.key!r}"
        return zlib.crc32(text.encode(errors="surrogatepass"))

    def run(self, submit: Callable[[Call], list[Future]], result: Tensors | None = None) -> Future | None:
        """Let the ranks agree, submit the jobs, and wait for them unless there is a ``result`` for a future.

        Args:
            submit: Submits the call's jobs, and returns their futures.
            result: The value of the future to return; ``None``: wait.
        """
        state, filled = self.state, [tensor for tensor in self.tensors if tensor.numel()]
        submitted: list[Future] = []
        # Tensors made here live on and are written elsewhere, so they must not be of inference mode.
        with torch_compat.profiler_range(f"ddp_quant_hooks.{self.name}"), torch.inference_mode(False):
            try:
                if filled and state.process_group.size() > 1:
                    with self.step.outcome:
                        state.begin_call(self.name, self._terms(), filled)
                        submitted = [future.then(self.step.outcome.of) for future in submit(self)]
                if result is None:
                    for future in submitted:
                        future.wait()
                    return None
            except Exception as error:
                state.fail(error)  # the peers hear of it
                if result is not None:
                    return failed_future(error, filled[0])
                raise
        return _future_of_all(submitted, filled, result)

    def _terms(self) -> dict[str, object]:
        """Return what must be equal on all ranks besides the tensors' lengths and dtypes, by name."""
        of_tensors = [owner for owner, one in zip(self.owners, self.tensors, strict=True) if one.numel()]
        return {
            "op": "AVG" if self.mean else "SUM",
            "key": self.key,
            **self.state.average.terms_of(of_tensors),
        }


def begin_call(
    name: str, state: AveragingState, tensors: Sequence[torch.Tensor], op: Any, key: str | None
) -> Call:
    """Check a call, and begin it as a part of a step.

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
    """
    if key is not None and not isinstance(key, str):
        raise TypeError(f"{name}: key must be a string, got {type(key).__name__}")
    mean = checked_operation(name, op)
    accelerators = {one.device for one in tensors if one.numel() and one.device.type != "cpu"}
    if len(accelerators) > 1:
        raise ValueError(f"{name}: the tensors are on {sorted(map(str, accelerators))}: call once for each")
    feedback, names = state.feedback, list[str]()
    if feedback.wanted:
        if key is None:
            raise ValueError(
                f"{name}: with error feedback a key must name these values, so that the next step finds "
                "their residuals"
            )
        names = [key] if len(tensors) == 1 else [f"{key}[{index}]" for index in range(len(tensors))]
        for one, tensor in zip(names, tensors, strict=True):
            feedback.require_length(one, value_count(tensor))
    for tensor in tensors:
        state.refuse_capture(tensor)
    step = feedback.begin_tensors()
    if key is not None and names:
        step.use([*dict.fromkeys([*names, key])])
    owners = [
        feedback.key_of(names[index], tensor) if names else Key.of("", tensor)
        for index, tensor in enumerate(tensors)
    ]
    return Call(name, state, tensors, owners, mean, key, step)


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
