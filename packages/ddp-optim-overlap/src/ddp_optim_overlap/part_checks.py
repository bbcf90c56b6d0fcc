"""What a trial before training cannot have seen, looked for in every step of a part of the parameters."""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.communication import may_communicate, refuse_collective
from ddp_optim_overlap.errors import UnsupportedOptimizerError
from ddp_optim_overlap.partial_steps import parameters_of
from ddp_optim_overlap.trial import own_attributes
from dist_utils.torch_compat import FUSED_CHECK, OperatorWatch, tensor_version

__all__ = ["PartChecks", "is_torchs_own", "refuse_kept_gradients"]

_WATCHED_STEPS = 3
"""Of every part, for collectives, where the optimizer's code names none."""
_DEPTH = 4
"""Of containers and objects in options and attributes."""
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the class is one of torch's, which keep to what the trial has seen."""
    return type(optimizer).__module__.startswith("torch.optim.")


class PartChecks:
    """Raise where a step of some parameters does what only a step of all of them may do.

    Args:
        optimizer: Whose parts are stepped. It must have passed its trial.
        is_part: Whether stand-ins step, with which changed options are lost, or the optimizer itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, is_part: bool = True) -> None:
        self._is_part = is_part
        self._none = is_torchs_own(optimizer)
        self._name = type(optimizer).__name__
        self._always_watched = not self._none and may_communicate(optimizer)
        self._steps: Counter[int] = Counter()
        self._owners: tuple[int, list[Any]] = (0, [])

    def around(self, part: torch.optim.Optimizer) -> AbstractContextManager[object]:
        """Return what to be in while ``part`` steps.

        Raises:
            UnsupportedOptimizerError: On leaving: the step has changed options or attributes, which are lost
                with the part, or it has kept a gradient, whose memory the next backward pass writes. Before
                a collective runs.
        """
        return contextlib.nullcontext() if self._none else self._checked(part)

    @contextlib.contextmanager
    def _checked(self, part: torch.optim.Optimizer) -> Iterator[None]:
        parameters = parameters_of(part)
        gradients = [one.grad for one in parameters if one.grad is not None]
        before = self._contents(part, [])
        self._steps[id(parameters[0])] += 1
        watched = self._always_watched or self._steps[id(parameters[0])] <= _WATCHED_STEPS
        with OperatorWatch(partial(refuse_collective, self._name)) if watched else contextlib.nullcontext():
            yield
        tensors: list[torch.Tensor] = []
        after = self._contents(part, tensors)
        if self._is_part and after != before:
            changed = next(what for what in {**before, **after} if before.get(what) != after.get(what))
            raise UnsupportedOptimizerError(
                f"the step of {self._name} has changed its {changed[0]} {changed[1]!r}, which would be "
                "lost, or happen once for every bucket. Use OverlapMode.AFTER_REDUCE, which steps all at once"
            )
        for parameter in parameters:
            _content(part.state.get(parameter), tensors)
        refuse_kept_gradients(self._name, tensors, gradients)

    def _contents(self, part: torch.optim.Optimizer, tensors: list[torch.Tensor]) -> dict[Any, Any]:
        """Return what is in options, attributes and state of no parameter, and add its tensors to a list."""
        contents = {
            ("option", key, number): _content(value, tensors)
            for number, group in enumerate(part.param_groups)
            for key, value in group.items()
            if key != "params"
        }
        for key, value in own_attributes(part).items():
            if key != FUSED_CHECK:
                contents["attribute", key, 0] = _content(value, tensors)
        state: Mapping[Any, Any] = part.state
        if self._owners[0] != len(state):
            self._owners = len(state), [owner for owner in state if not isinstance(owner, torch.Tensor)]
        for owner in self._owners[1]:
            contents["state", owner, 0] = _content(state.get(owner), tensors)
        return contents


def refuse_kept_gradients(
    optimizer: str, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> None:
    """Raise if a tensor shares memory with gradients, which lie in one bucket.

    Raises:
        UnsupportedOptimizerError: One does.
    """
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided and gradient.numel()]
    if not dense:
        return
    begin = min(gradient.data_ptr() for gradient in dense)
    end = max(gradient.data_ptr() + gradient.nbytes for gradient in dense)
    for tensor in tensors:
        if tensor.layout is torch.strided and begin <= tensor.data_ptr() < end:
            raise UnsupportedOptimizerError(
                f"the step of {optimizer} keeps a gradient itself, and not a copy of it: the next backward "
                "pass writes there. Use OverlapMode.AFTER_REDUCE"
            )


def _content(value: Any, tensors: list[torch.Tensor], depth: int = _DEPTH) -> Any:
    """Return what compares equal as long as a value has the same content, and add its tensors to a list."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return id(value), tensor_version(value)
    if not depth or isinstance(value, (torch.nn.Module, type)):
        return id(value)
    if isinstance(value, Mapping):
        return id(value), tuple(map(id, value)), _contents_of(value.values(), tensors, depth)
    if isinstance(value, (list, tuple, deque)):
        return id(value), _contents_of(value, tensors, depth)
    if isinstance(value, (set, frozenset)):
        return id(value), frozenset(map(id, value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict) and not callable(value):
        return id(value), _contents_of(attributes.values(), tensors, depth)
    return id(value), value.tobytes() if hasattr(value, "tobytes") else None  # NumPy's


def _contents_of(values: Any, tensors: list[torch.Tensor], depth: int) -> tuple[Any, ...]:
    if _PLAIN.issuperset(map(type, values)):
        return tuple(values)
    return tuple(_content(value, tensors, depth - 1) for value in values)
