"""Step an optimizer on small values, which its own parameters hold while the trial lasts."""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ddp_optim_overlap.copies import Copies
from ddp_optim_overlap.equality import equal
from ddp_optim_overlap.optimizer_hooks import step_without_hooks
from ddp_optim_overlap.partial_steps import PartialSteps, is_torchs_own, parameters_of, part_of, stand_in
from ddp_optim_overlap.tensor_versions import keep_versions
from dist_utils.torch_compat import tensor_version

__all__ = [
    "Run",
    "Trial",
    "compiling_refused",
    "longest_side",
    "own_attributes",
    "random_numbers_restored",
    "shared_state",
]

_REAL_VALUES = 2**15
"""Parameters with fewer values in total are tried in their real shapes, others with shorter sides."""
_LONGEST_SIDES = (64, 16, 8, 4)
_LEAST_RATE = 0.01
"""A warm-up may begin with a learning rate of zero, at which no step has a visible effect."""
_OF_EVERY_OPTIMIZER = frozenset(
    torch.optim.Optimizer([torch.zeros(1, device="cpu")], {}).__dict__  # whatever the default device is
) - {"defaults"}
"""Attributes that do not affect the step, mostly hooks; groups and state are copied separately."""


class Trial:
    """Lends small values to the parameters of an optimizer while it is entered.

    The parameters themselves stay the same objects, so code that knows them by identity, name, ``id()`` or an
    attribute finds them. Each :class:`Run` has its own values, gradients, state, options and attributes.

    Args:
        optimizer: Not changed.
        chosen: The groups and positions of the parameters to step. The others get values but no gradient.
        parallel: Options with one value per parameter of a group.
        longest: Sides longer than this are shortened, also those of state and other tensors.
        with_state: Whether the chosen parameters keep the state that they have in the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chosen: Sequence[tuple[int, int]],
        parallel: Collection[str],
        *,
        longest: int,
        with_state: bool = True,
    ) -> None:
        self.optimizer = optimizer
        self.chosen = [optimizer.param_groups[number]["params"][position] for number, position in chosen]
        self.parallel = parallel
        self.places = chosen
        self._longest = longest
        self.with_state = with_state
        self._real: dict[torch.Tensor, torch.Tensor] = {}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Lend the values, and restore everything on exit."""
        parameters = list(dict.fromkeys(parameters_of(self.optimizer)))
        gradients = [parameter.grad for parameter in parameters]
        attributes = [dict(vars(parameter)) for parameter in parameters]
        self._real = {parameter: parameter.data for parameter in parameters}
        with ExitStack() as stack:
            stack.enter_context(keep_versions(parameters))
            stack.enter_context(torch.device("cpu"))  # a step on the worker also creates tensors there
            stack.enter_context(torch.no_grad())
            try:
                for parameter, real in self._real.items():
                    parameter.grad = None
                    parameter.data = real.new_zeros([side_of(size, 1) for size in real.shape])
                yield
            finally:
                for (parameter, real), gradient, own in zip(
                    self._real.items(), gradients, attributes, strict=True
                ):
                    _exchange_attributes(parameter, own)
                    parameter.grad = None
                    parameter.data = real
                    parameter.grad = gradient

    def run(self, *, raised: bool = True) -> Run:
        """Return a copy of the optimizer with copies of the chosen values and of all that may change.

        Args:
            raised: Whether learning rates are raised so that every step has a visible effect.
        """
        optimizer = self.optimizer
        memo: dict[int, Any] = {id(parameter): parameter for parameter in parameters_of(optimizer)}
        copied = Copies(memo, self._short_copy).of
        state: defaultdict[Any, Any] = defaultdict(dict)
        for parameter in self.chosen:
            if parameter in optimizer.state and self.with_state:
                state[parameter] = copied(optimizer.state[parameter])
        for owner, value in shared_state(optimizer).items():
            state[owner] = copied(value)
        positions: dict[int, list[int]] = defaultdict(list)
        for number, position in self.places:
            positions[number].append(position)
        groups = []
        for number, original in enumerate(optimizer.param_groups):
            if number not in positions and is_torchs_own(optimizer):
                continue  # as in its partial steps
            part = part_of(original, positions[number], self.parallel)
            group = {key: value if key == "params" else copied(value) for key, value in part.items()}
            if raised:
                _raise_rate(group)
            memo[id(original)] = group
            groups.append(group)
        run = stand_in(optimizer, groups)
        run.state = state
        memo |= {id(optimizer): run, id(optimizer.state): state, id(optimizer.param_groups): groups}
        for key, value in own_attributes(run).items():
            run.__dict__[key] = copied(value)
        values = {
            parameter: _with_zeros(self._short_copy(self._real[parameter])) for parameter in self.chosen
        }
        attributes = {parameter: copied(dict(vars(parameter))) for parameter in self.chosen}
        return Run(run, values, attributes, self.parallel, self._real)

    def _short_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor's beginning, cut in the same way for all tensors of one shape."""
        if tensor.layout is torch.strided:
            tensor = tensor[tuple(slice(side_of(size, self._longest)) for size in tensor.shape)]
        return tensor.detach().clone()


class Run:
    """One copy of the optimizer, with its own values for parameters and gradients.

    Attributes:
        optimizer: The copy.
        values: The values of the parameters.
        attributes: The attributes of the parameters: some optimizers keep state there.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        values: dict[torch.Tensor, torch.Tensor],
        attributes: dict[torch.Tensor, dict[str, Any]],
        parallel: Collection[str],
        everything: Collection[torch.Tensor],
    ) -> None:
        self.optimizer = optimizer
        self.values = values
        self.attributes = attributes
        self._everything = everything
        self._parts = PartialSteps([optimizer], [parallel])
        self._lent = {parameter: torch.empty_like(value) for parameter, value in values.items()}

    def step(
        self, gradients: Sequence[torch.Tensor | None], closure: Callable[[], Any] | None = None
    ) -> set[torch.Tensor]:
        """Step all at once with new gradients; return the other parameters that were written."""
        with self._having_values():
            for parameter, gradient in zip(self.values, gradients, strict=True):
                parameter.grad = None if gradient is None else gradient.clone()
            before = _contents(other for other in self._everything if other not in self.values)
            step_without_hooks(self.optimizer, *(() if closure is None else (closure,)))
            return _written(before)

    def step_apart(self, gradients: Sequence[torch.Tensor], direction: int) -> set[torch.Tensor]:
        """Step one parameter after another; return those that were written although they were not stepped.

        As in a backward pass, gradients reuse the memory of the last ones, as in a bucket. Other parameters
        have gradients that are not averaged yet in the reverse direction, and none in the forward direction.
        """
        strangers: set[torch.Tensor] = set()
        with self._having_values():
            for parameter, gradient in zip(self.values, gradients, strict=True):
                self._lent[parameter].copy_(gradient)
                parameter.grad = gradient * 3 + 1 if direction < 0 else None
            for parameter in list(self.values)[::direction]:
                own, parameter.grad = parameter.grad, self._lent[parameter]
                before = _contents(other for other in self.values if other is not parameter)
                self._parts.step([parameter])
                strangers |= _written(before)
                parameter.grad = own
        return strangers

    @contextlib.contextmanager
    def _having_values(self) -> Iterator[None]:
        for parameter, value in self.values.items():
            parameter.data = value
        real = {parameter: _exchange_attributes(parameter, own) for parameter, own in self.attributes.items()}
        try:
            yield
        finally:
            for parameter in self.values:
                parameter.grad = None
                self.values[parameter] = parameter.data
                self.attributes[parameter] = _exchange_attributes(parameter, real[parameter])


def side_of(size: int, longest: int) -> int:
    """Return the length in a trial of a side of this size; it never decreases with the size."""
    return size if size <= longest else longest + int(longest * math.log2(size / longest)) // 4


def longest_side(parameters: Sequence[torch.Tensor]) -> int:
    """Return the longest side to keep unshortened, so that a trial of these parameters is small."""
    for longest in (max((max(one.shape, default=1) for one in parameters), default=1), *_LONGEST_SIDES):
        sizes = (math.prod(side_of(size, longest) for size in one.shape) for one in parameters)
        if sum(sizes) <= _REAL_VALUES:
            return longest
    return _LONGEST_SIDES[-1]


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that are specific to this optimizer."""
    return {key: value for key, value in optimizer.__dict__.items() if key not in _OF_EVERY_OPTIMIZER}


def shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter."""
    state: dict[Any, Any] = optimizer.state
    return {owner: value for owner, value in state.items() if not isinstance(owner, torch.Tensor)}


def _with_zeros(values: torch.Tensor) -> torch.Tensor:
    """Set every other value to zero, where the smallest step is visible."""
    places = torch.arange(values.numel(), device=values.device)
    return values.masked_fill_((places % 2 == 1).view(values.shape), 0)


def _raise_rate(group: dict[str, Any]) -> None:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate.clamp_(min=_LEAST_RATE)
    elif isinstance(rate, (int, float)):
        group["lr"] = max(rate, _LEAST_RATE)


def _exchange_attributes(parameter: torch.Tensor, attributes: dict[str, Any]) -> dict[str, Any]:
    """Give a parameter these attributes, and return those that it had."""
    before = dict(vars(parameter))
    vars(parameter).clear()
    vars(parameter).update(attributes)
    return before


def _contents(tensors: Iterable[torch.Tensor]) -> dict[torch.Tensor, tuple[int, torch.Tensor | None]]:
    """Return versions and, on accelerators, where operators on lists raise no versions, also values."""
    return {
        tensor: (tensor_version(tensor), None if tensor.is_cpu else tensor.detach().clone())
        for tensor in tensors
    }


def _written(contents: dict[torch.Tensor, tuple[int, torch.Tensor | None]]) -> set[torch.Tensor]:
    return {
        tensor
        for tensor, (version, values) in contents.items()
        if tensor_version(tensor) != version or (values is not None and not equal(values, tensor.detach()))
    }


@contextlib.contextmanager
def compiling_refused() -> Iterator[None]:
    """Make functions under ``torch.compile`` raise instead of being compiled."""
    stance = getattr(torch.compiler, "set_stance", None)
    # Anything compiled has imported this module; importing it here would take seconds.
    with (
        contextlib.nullcontext()
        if stance is None or "torch._dynamo" not in sys.modules
        else stance("fail_on_recompile")
    ):
        yield


@contextlib.contextmanager
def random_numbers_restored(parameters: Sequence[torch.Tensor], seed: int) -> Iterator[Callable[[], bool]]:
    """Seed the random generators, and restore them on exit.

    Yields:
        A function that returns whether any random numbers were drawn.
    """
    devices = {parameter.device.index for parameter in parameters if parameter.device.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in devices)]
    states, python_state = [generator.get_state() for generator in generators], random.getstate()
    try:
        for generator in generators:
            generator.manual_seed(seed)
        random.seed(seed)
        begin, python_begin = [generator.get_state() for generator in generators], random.getstate()
        yield (
            lambda: (
                random.getstate() != python_begin
                or not all(
                    torch.equal(generator.get_state(), state)
                    for generator, state in zip(generators, begin, strict=True)
                )
            )
        )
    finally:
        random.setstate(python_state)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
