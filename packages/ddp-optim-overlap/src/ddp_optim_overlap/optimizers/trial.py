"""A short trial of whether an optimizer steps per parameter, on copies of it with small parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ddp_optim_overlap.errors import UnsupportedGradientError, UnsupportedOptimizerError
from ddp_optim_overlap.optimizers.equality import same_value
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps, parameters_of, part_of, stand_in
from ddp_optim_overlap.optimizers.step_hooks import NOT_OF_THE_STEP, step_without_hooks
from dist_utils.process_groups import error_text
from dist_utils.torch_compat import MissingTorchFeatureError, private

_CASES: list[tuple[str, float, float | None]] = [
    # They grow, or momentum would hide the small ones.
    *(("", scale, 1.0) for scale in (1e-6, 1e-3, 1.0, 1e3)),
    (", one of them with a gradient of zeros", 1.0, 0.0),
    (", all of them with gradients of zeros", 0.0, 1.0),
    (", one of them without a gradient", 1.0, None),
    (", one of them with an infinite gradient", 1.0, math.inf),
    (", one of them with a gradient of NaN", 1.0, math.nan),
]
"""The steps of a trial: what is special, the scale of the gradients, and a factor of one of them."""
_OTHER_SCALE = 1e-5
"""Scale of every other gradient in a step, so that a limit between two scales is between two gradients."""
_LEAST_RATE = 0.01
"""A warm-up may begin with a learning rate at which no step has a visible effect."""
_MOST_KINDS = 16
"""How many kinds of parameters are tried at most; two of each."""
_MOST_VALUES = 1024
"""The sides of parameters with more values are cut."""
_LONGEST_SIDE = 8
_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional::", "symm_mem::")

_NOT_OF_THE_STEP = (UnsupportedOptimizerError, UnsupportedGradientError, MissingTorchFeatureError)
"""Errors that a step does not raise by itself."""

_Gradients = list[torch.Tensor | None]
_Places = list[tuple[int, int]]
"""Parameters, each by the number of its group and its position there."""


def refusal(reason: str) -> UnsupportedOptimizerError:
    """Return the error for an optimizer that cannot be overlapped, with the remedy."""
    return UnsupportedOptimizerError(f"{reason}: use the ordinary loop with the same communication hook")


def require_passed_trial(optimizer: torch.optim.Optimizer, sparse: Mapping[torch.Tensor, str]) -> None:
    """Raise unless stepping parameters one by one gives the same bits as stepping them together.

    Args:
        optimizer: Not changed, nor are its parameters, their gradients and its state.
        sparse: Parameters with sparse gradients, and their names, for a step of their own.

    Raises:
        UnsupportedOptimizerError: Values, states or options differ, as they also do if a step draws random
            numbers or keeps a gradient; it sets attributes, fails, communicates or moves nothing; or the
            optimizer cannot be copied.
        UnsupportedGradientError: The step fails with sparse gradients.

    Cost:
        Nine steps of three copies with some small parameters of each group: some tenths of a second.
    """
    places = _places_to_try(optimizer, sparse)
    try:
        with _trial(optimizer):
            if places:
                _compare(optimizer, places)
            _require_sparse_support(optimizer, sparse)
    except _NOT_OF_THE_STEP:
        raise
    except Exception as error:
        name = type(optimizer).__name__
        raise refusal(
            f"the step of {name} failed on small copies of parameters, with {error_text(error)}"
        ) from error


def _require_sparse_support(optimizer: torch.optim.Optimizer, sparse: Mapping[torch.Tensor, str]) -> None:
    """Raise if copies of these parameters cannot be stepped with sparse gradients."""
    places = {
        (number, at): sparse[one]
        for number, group in enumerate(optimizer.param_groups)
        for at, one in enumerate(group["params"])
        if one in sparse
    }
    if not places:
        return
    copied = _Copy(optimizer, list(places))
    try:
        copied.step([torch.ones_like(one).to_sparse(1) for one in copied.parameters])
    except _NOT_OF_THE_STEP:
        raise
    except Exception as error:
        raise UnsupportedGradientError(
            f"{copied.name} cannot step {', '.join(places.values())}, whose gradient is sparse, with "
            f"{error_text(error)}. Use SGD, Adagrad or SparseAdam for it, or an embedding with sparse=False"
        ) from error


def _compare(optimizer: torch.optim.Optimizer, places: _Places) -> None:
    """Raise if copies whose parameters are stepped one by one end with other bits."""
    numbers = [number for number, _ in places]
    special = numbers.index(max(numbers, key=numbers.count))  # beside others of its group
    fresh, *copies = (_Copy(optimizer, places) for _ in range(4))
    moved = False
    for seed, (case, scale, factor) in enumerate(_CASES):
        ordinary = _gradients(fresh.parameters, scale, seed)
        changed = None if factor is None else ordinary[special] * factor
        gradients = [*ordinary[:special], changed, *ordinary[special + 1 :]]
        if not _step_alike(copies, gradients, case):
            copies = [_Copy(optimizer, places) for _ in copies]
        moved = moved or bool(copies[0].difference(fresh))
    if not moved:
        raise refusal(f"the step of {fresh.name} does not move the parameters in its groups")


def _step_alike(copies: list[_Copy], gradients: _Gradients, case: str) -> bool:
    """Step parameters together, one by one, and in reverse order; raise unless that is all the same.

    Returns:
        Whether the steps were done. In special cases they may fail, as in an ordinary loop, if all do.
    """
    together, *apart = copies
    failures = []
    for copied, direction in zip(copies, (0, 1, -1), strict=True):
        try:
            copied.step(gradients, direction)
        except _NOT_OF_THE_STEP:  # noqa: PERF203 - three steps are few
            raise
        except Exception as error:  # noqa: BLE001 - a step may raise anything
            failures.append(error)
    if case and len(failures) == len(copies):
        return False
    if failures:
        raise failures[0]
    if found := next(filter(None, map(together.difference, apart)), ""):
        text = f"does not step per parameter: {found} differs if parameters are stepped one by one{case}"
        raise refusal(f"{together.name} {text}")
    return True


class _Copy:
    """A copy of an optimizer with small copies of some of its parameters.

    Attributes:
        name: The name of the optimizer's class.
        parameters: The small parameters, in the order of the groups.

    Args:
        optimizer: Not changed.
        places: The parameters of the copy.

    Raises:
        UnsupportedOptimizerError: The optimizer has what cannot be copied.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, places: _Places) -> None:
        self.name = type(optimizer).__name__
        try:
            self._copy(optimizer, places)
        except Exception as error:
            raise refusal(f"{self.name} cannot be copied for a trial, with {error_text(error)}") from error

    def _copy(self, optimizer: torch.optim.Optimizer, places: _Places) -> None:
        self._optimizer = stand_in(optimizer, [])
        groups = [
            part_of(group, [at for other, at in places if other == number])
            for number, group in enumerate(optimizer.param_groups)
        ]
        originals = [one for group in groups for one in group["params"]]
        small = {one: one.detach()[(slice(1),) * one.dim()].clone() for one in parameters_of(optimizer)}
        small |= {one: _small(one) for one in originals}
        memo: dict[int, Any] = {id(optimizer): self._optimizer, **{id(one): small[one] for one in small}}
        wanted = (
            groups,
            _shared_state(optimizer),
            _own_attributes(optimizer),
            [vars(one) for one in originals],
        )
        groups, state, attributes, of_parameters = copy.deepcopy(wanted, memo)
        for group in groups:
            if isinstance(group.get("lr"), (int, float, torch.Tensor)):
                group["lr"] = max(group["lr"], 0 * group["lr"] + _LEAST_RATE)
        for one in originals:
            with _CutCopies(one) as cuts:
                known = copy.deepcopy(optimizer.state.get(one, {}), memo)
            if known and cuts.fit:  # the constructor may have made it
                state[small[one]] = known
        vars(self._optimizer).update(attributes, param_groups=groups, state=defaultdict(dict, state))
        self.parameters = [small[one] for one in originals]
        for one, own in zip(self.parameters, of_parameters, strict=True):
            vars(one).update(own)
        self._gradients = [torch.empty_like(one) for one in self.parameters]

    def step(self, gradients: _Gradients, direction: int = 0) -> None:
        """Step all parameters at once, or one after another in a direction."""
        if direction:
            self._step_apart(gradients, direction)
            return
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = None if gradient is None else gradient.clone()
        step_without_hooks(self._optimizer)

    def _step_apart(self, gradients: _Gradients, direction: int) -> None:
        """As in a backward pass, gradients reuse memory, and others are missing or not averaged yet."""
        parts = PartialSteps([self._optimizer])
        parts.begin()
        for parameter in self.parameters:
            parameter.grad = None if direction > 0 else torch.ones_like(parameter)
        steps = list(zip(self.parameters, self._gradients, gradients, strict=True))
        for parameter, lent, gradient in steps[::direction]:
            before, parameter.grad = parameter.grad, None if gradient is None else lent.copy_(gradient)
            parts.step([parameter])
            parameter.grad = before
        parts.finish()

    def difference(self, other: _Copy) -> str:
        """Describe the first difference to another copy; what may cause the rest is first."""
        mine, theirs = self.contents(), other.contents()
        found = (what for what in {**mine, **theirs} if not same_value(mine.get(what), theirs.get(what)))
        return next(found, "")

    def contents(self) -> dict[str, Any]:
        """Return what a step may change, with descriptions."""
        found = {
            f"option {name!r} of group {number}": value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        found["state of no parameter"] = _shared_state(self._optimizer)
        state = self._optimizer.state
        found["a parameter or its state"] = [(one.detach(), state.get(one, {})) for one in self.parameters]
        return found


class _CutCopies(TorchFunctionMode):
    """Cuts the tensors of a large parameter's state like the parameter when they are copied, however nested.

    Attributes:
        fit: Whether that is possible: they are all of the parameter's shape, or of one value.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        super().__init__()
        self._parameter = parameter
        self.fit = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, unless it copies a tensor."""
        del types
        if func not in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return func(*args, **(kwargs or {}))
        tensor, parameter = args[0], self._parameter
        alike = tensor.layout is torch.strided and tensor.shape in ((), parameter.shape)
        self.fit &= alike or parameter.numel() <= _MOST_VALUES
        return _cut(tensor, parameter) if alike else tensor.detach().clone()


def _places_to_try(optimizer: torch.optim.Optimizer, left_out: Collection[torch.Tensor]) -> _Places:
    """Return the smallest and the largest parameter of each group, number of dimensions, dtype and device."""
    kinds: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    seen = set(left_out)  # a parameter may occur twice
    for number, group in enumerate(optimizer.param_groups):
        for at, one in enumerate(group["params"]):
            if one.requires_grad and one.numel() and one not in seen:
                seen.add(one)
                kinds[number, one.dim(), one.dtype, one.device].append((one.numel(), at))
    chosen = list(kinds)[:: math.ceil(len(kinds) / _MOST_KINDS) or 1]
    return sorted({(kind[0], at) for kind in chosen for _, at in (min(kinds[kind]), max(kinds[kind]))})


def _small(parameter: torch.Tensor) -> torch.Tensor:
    """Return a small copy of a parameter; every other value is zero, where the smallest step is visible."""
    values = _cut(parameter, parameter)
    odd = torch.arange(values.numel(), device=values.device) % 2 == 1
    return torch.nn.Parameter(values.masked_fill_(odd.view(values.shape), 0), parameter.requires_grad)


def _cut(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a parameter, or of a tensor of its state, that is small if the parameter is not."""
    if parameter.numel() > _MOST_VALUES:
        tensor = tensor[(slice(_LONGEST_SIDE),) * tensor.dim()]
    return tensor.detach().clone()


def _gradients(parameters: Sequence[torch.Tensor], scale: float, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    found = []
    for place, one in enumerate(parameters):
        dtype = torch.complex64 if one.is_complex() else torch.float32
        gradient = torch.randn(one.shape, generator=generator, dtype=dtype, device="cpu") * scale
        gradient *= _OTHER_SCALE if (place + seed) % 2 else 1.0
        # With the parameter's strides, because the order of a sum depends on them.
        found.append(torch.empty_like(one).copy_(gradient))
    return found


def _own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that may affect the step, besides options and state."""
    return {name: one for name, one in vars(optimizer).items() if name not in _other_attributes()}


@functools.cache
def _other_attributes() -> frozenset[str]:
    of_every = torch.optim.Optimizer([torch.zeros(1, device="cpu")], {})
    return frozenset(vars(of_every)) - {"defaults"} | NOT_OF_THE_STEP


def _shared_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Return the state that belongs to no parameter."""
    state: dict[Any, Any] = optimizer.state
    return {owner: value for owner, value in state.items() if not isinstance(owner, torch.Tensor)}


@contextlib.contextmanager
def _trial(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Step as a worker's thread would; refuse collectives, compile nothing, and restore random generators."""
    # Anything compiled has imported this module; importing it here would take seconds.
    compiles = "torch._dynamo" in sys.modules
    sources = _random_sources(optimizer)
    states = [get() for get, _ in sources]
    try:
        with (
            torch.no_grad(),
            torch.device("cpu"),  # a step on the worker also creates tensors there
            torch.compiler.set_stance("fail_on_recompile") if compiles else contextlib.nullcontext(),
            _refuse_collectives(type(optimizer).__name__),
        ):
            yield
    finally:
        for (_, put), state in zip(sources, states, strict=True):
            put(state)


def _random_sources(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return for each generator that a step may use what gets its state, and what sets it."""
    sources: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
        (torch.get_rng_state, torch.set_rng_state),
        (random.getstate, random.setstate),
    ]
    if numpy := sys.modules.get("numpy.random"):
        sources.append((numpy.get_state, numpy.set_state))
    for device in {one.device for one in parameters_of(optimizer)}:
        module: Any = getattr(torch, device.type, None)
        if hasattr(module, "get_rng_state"):
            get_of_device = partial(module.get_rng_state, device)
            sources.append((get_of_device, partial(module.set_rng_state, device=device)))
    for kind in type(optimizer).__mro__:
        values = vars(sys.modules[kind.__module__]).values()
        sources += [(one.get_state, one.set_state) for one in values if isinstance(one, torch.Generator)]
    return sources


def _refuse_collectives(optimizer: str) -> Any:
    """Return a context in which this thread's collectives raise before they run."""
    base: Any = private("torch.utils._python_dispatch", "TorchDispatchMode", "noticing collectives of a step")

    class Watch(base):  # type: ignore[misc] # torch's class
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Run an operator that is no collective. There is no public name for this up to torch 2.15."""
            del types
            if func.name().startswith(_COLLECTIVES):
                raise refusal(f"the step of {optimizer} communicates ({func.name()})")
            return func(*args, **(kwargs or {}))

    return Watch()
