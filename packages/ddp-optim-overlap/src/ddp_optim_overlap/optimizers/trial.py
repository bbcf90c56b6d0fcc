"""A short trial of whether an optimizer steps per parameter, on copies of it with small parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.errors import UnsupportedOptimizerError, text_of
from ddp_optim_overlap.optimizers.partial_steps import PartialSteps, parameters_of, part_of, stand_in
from ddp_optim_overlap.optimizers.step_hooks import NOT_OF_THE_STEP, step_without_hooks
from dist_utils.torch_compat import MissingTorchFeatureError, private

__all__ = ["OptimizerCopy", "refusal", "require_passed_trial"]

_CASES: list[tuple[str, float, float | None]] = [
    # First, while no parameter has a state: a frozen parameter never gets one.
    (", one of them without a gradient", 1.0, None),
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
_MOST_GROUPS = 1024
"""How many groups all partial steps of one case have, at most; nearly all are empty, but cost time."""
_MOST_VALUES = 1024
"""The sides of parameters with more values are cut."""
_LONGEST_SIDE = 8
_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional::", "symm_mem::")

_NOT_OF_THE_STEP = (UnsupportedOptimizerError, MissingTorchFeatureError)
"""Errors that a step does not raise by itself."""

Gradients = list[torch.Tensor | None]
Places = list[tuple[int, int]]
"""Parameters, each by the number of its group and its position there."""


def refusal(reason: str) -> UnsupportedOptimizerError:
    """Return the error for an optimizer that cannot be overlapped, with the remedy."""
    return UnsupportedOptimizerError(f"{reason}: use the ordinary loop with the same communication hook")


def require_passed_trial(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> None:
    """Raise unless stepping parameters one by one gives the same bits as stepping them together.

    Args:
        optimizer: Not changed, nor are its parameters, their gradients and its state.
        sparse: Parameters with sparse gradients, which are left out.

    Raises:
        UnsupportedOptimizerError: Values, states, options or attributes differ, a step fails, communicates,
            draws random numbers, keeps a gradient or moves nothing, or the optimizer cannot be copied.

    Cost:
        Ten steps of three copies with some small parameters of each group: some tenths of a second.
    """
    places = _places_to_try(optimizer, sparse)
    try:
        if places:
            _compare(optimizer, places)
    except _NOT_OF_THE_STEP:
        raise
    except Exception as error:
        name = type(optimizer).__name__
        raise refusal(
            f"the step of {name} failed on small copies of parameters, with {text_of(error)}"
        ) from error


def _compare(optimizer: torch.optim.Optimizer, places: Places) -> None:
    """Raise if copies whose parameters are stepped one by one end with other bits."""
    numbers = [number for number, _ in places]
    special = numbers.index(max(numbers, key=numbers.count))  # beside others of its group
    fresh, *copies = (OptimizerCopy(optimizer, places) for _ in range(4))
    moved = False
    for seed, (case, scale, factor) in enumerate(_CASES):
        ordinary = _gradients(fresh.parameters, scale, seed)
        changed = None if factor is None else ordinary[special] * factor
        gradients = [*ordinary[:special], changed, *ordinary[special + 1 :]]
        together, stepped = copies[0], _step_alike(copies, gradients, case)
        moved = moved or bool(together.difference(fresh))
        if seed == 0 and together.has_changed(special, fresh) and _has_frozen(optimizer):
            raise refusal(
                f"the step of {fresh.name} moves parameters that have no gradient, and some of its "
                "parameters are frozen, which are in no bucket. Leave those out of the optimizer. Otherwise"
            )
        if seed == 0 or not stepped:  # some optimizers need gradients of all parameters in their first step
            copies = [OptimizerCopy(optimizer, places) for _ in copies]
    if not moved:
        raise refusal(f"the step of {fresh.name} does not move the parameters in its groups")


def _step_alike(copies: list[OptimizerCopy], gradients: Gradients, case: str) -> bool:
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


class OptimizerCopy:
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

    def __init__(self, optimizer: torch.optim.Optimizer, places: Places) -> None:
        self.name = type(optimizer).__name__
        try:
            self._copy(optimizer, places)
        except Exception as error:
            raise refusal(f"{self.name} cannot be copied for a trial, with {text_of(error)}") from error

    def _copy(self, optimizer: torch.optim.Optimizer, places: Places) -> None:
        self._optimizer = stand_in(optimizer, [])
        groups = [
            part_of(group, [at for other, at in places if other == number])
            for number, group in enumerate(optimizer.param_groups)
        ]
        originals = [one for group in groups for one in group["params"]]
        small = {one: one.detach()[(slice(1),) * one.dim()].clone() for one in parameters_of(optimizer)}
        small |= {one: _small(one) for one in originals}
        memo: dict[int, Any] = {id(optimizer): self._optimizer, **{id(one): small[one] for one in small}}
        state = _shared_state(optimizer)
        for one in originals:
            known = optimizer.state.get(one, {})
            tensors = [value for value in known.values() if isinstance(value, torch.Tensor)]
            like_parameter = (
                value.layout is torch.strided and value.shape in ((), one.shape) for value in tensors
            )
            if known and all(like_parameter):  # the constructor may have made it; others cannot be cut alike
                state[one] = known
                memo |= {id(value): _cut(value, one) for value in tensors}
        wanted = groups, state, _own_attributes(optimizer), [vars(one) for one in originals]
        groups, state, attributes, of_parameters = copy.deepcopy(wanted, memo)
        for group in groups:
            if isinstance(group.get("lr"), (int, float, torch.Tensor)):
                group["lr"] = max(group["lr"], 0 * group["lr"] + _LEAST_RATE)
        vars(self._optimizer).update(attributes, param_groups=groups, state=defaultdict(dict, state))
        self.parameters = [small[one] for one in originals]
        for one, own in zip(self.parameters, of_parameters, strict=True):
            vars(one).update(own)
        self._lent = [torch.empty_like(one) for one in self.parameters]
        self._objects = [self._optimizer, *small.values()]

    def step(self, gradients: Gradients, direction: int = 0) -> None:
        """Step all parameters at once, or one after another in a direction."""
        # Anything compiled has imported this module; importing it here would take seconds.
        compiles = "torch._dynamo" in sys.modules
        with (
            _random_numbers_refused(self._optimizer),
            torch.no_grad(),
            torch.device("cpu"),  # a step on the worker also creates tensors there
            torch.compiler.set_stance("fail_on_recompile") if compiles else contextlib.nullcontext(),
            _collectives_refused(self.name),
        ):
            if direction:
                self._step_apart(gradients, direction)
            else:
                self._step_together(gradients)

    def _step_together(self, gradients: Gradients) -> None:
        given = [None if gradient is None else gradient.clone() for gradient in gradients]
        for parameter, gradient in zip(self.parameters, given, strict=True):
            parameter.grad = gradient
        step_without_hooks(self._optimizer)
        if _memory(given) & _memory(self.contents()):
            raise refusal(f"the step of {self.name} keeps a gradient itself, not a copy, for the next step")

    def _step_apart(self, gradients: Gradients, direction: int) -> None:
        """As in a backward pass, gradients reuse memory, and others are missing or not averaged yet."""
        parts = PartialSteps([self._optimizer])
        parts.begin()
        for parameter in self.parameters:
            parameter.grad = None if direction > 0 else torch.ones_like(parameter)
        steps = list(zip(self.parameters, self._lent, gradients, strict=True))
        for parameter, lent, gradient in steps[::direction]:
            before, parameter.grad = parameter.grad, None if gradient is None else lent.copy_(gradient)
            parts.step([parameter])
            parameter.grad = before
        parts.finish()

    def has_changed(self, number: int, fresh: OptimizerCopy) -> bool:
        """Return whether a parameter or its state is no longer as in a copy that was never stepped."""
        mine, theirs = (each.contents()["a parameter or its state"][number] for each in (self, fresh))
        return not _equal(mine, theirs, {})

    def difference(self, other: OptimizerCopy) -> str:
        """Describe the first difference to another copy; what may cause the rest is first."""
        twins = dict(zip(map(id, self._objects), other._objects, strict=True))
        mine, theirs = self.contents(), other.contents()
        found = (what for what in {**mine, **theirs} if not _equal(mine.get(what), theirs.get(what), twins))
        return next(found, "")

    def contents(self) -> dict[str, Any]:
        """Return what a step may change, with descriptions."""
        found = {
            f"option {name!r} of group {number}": value
            for number, group in enumerate(self._optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        found |= {f"attribute {name!r}": one for name, one in _own_attributes(self._optimizer).items()}
        found["state of no parameter"] = _shared_state(self._optimizer)
        state = self._optimizer.state
        found["a parameter or its state"] = [
            (one.detach(), state.get(one, {}), vars(one)) for one in self.parameters
        ]
        return found


def _places_to_try(optimizer: torch.optim.Optimizer, sparse: Collection[torch.Tensor]) -> Places:
    """Return the smallest and the largest parameter of each group, number of dimensions, dtype and device."""
    kinds: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    left_out = set(map(id, sparse))
    for number, group in enumerate(optimizer.param_groups):
        for at, one in enumerate(group["params"]):
            if one.requires_grad and one.numel() and id(one) not in left_out:
                left_out.add(id(one))  # it may occur twice
                kinds[number, one.dim(), one.dtype, one.device].append((one.numel(), at))
    most = max(4, _MOST_GROUPS // len(optimizer.param_groups))
    chosen = list(kinds)[:: math.ceil(2 * len(kinds) / most) or 1]
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


def _has_frozen(optimizer: torch.optim.Optimizer) -> bool:
    return not all(one.requires_grad for one in parameters_of(optimizer))


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


def _memory(value: Any) -> set[int]:
    """Return the addresses of the memory of the tensors in a value and its containers."""
    if isinstance(value, torch.Tensor):
        return {value.untyped_storage().data_ptr()} - {0} if value.layout is torch.strided else set()
    parts = value.values() if isinstance(value, Mapping) else value
    return set().union(*map(_memory, parts)) if isinstance(value, (Mapping, list, tuple, deque)) else set()


def _equal(one: Any, other: Any, twins: Mapping[int, Any], above: frozenset[int] = frozenset()) -> bool:
    """Compare bitwise; objects are equal if everything that a copy of them has is.

    Args:
        one: A value.
        other: A value of another copy of the optimizer.
        twins: What counts as equal to an object, by its ``id()``.
        above: The objects that contain ``one``, which may be among them.
    """
    if one is other or id(one) in above:
        return True
    if id(one) in twins:
        return twins[id(one)] is other
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return _same_bits(one, other)
    if isinstance(one, (int, float, complex, str, bytes)):
        return repr(one) == repr(other)  # NaN, too
    equal = partial(_equal, twins=twins, above=above | {id(one)})
    if isinstance(one, Mapping):
        keys = {twins.get(id(key), key): key for key in one}
        return keys.keys() == other.keys() and all(equal(one[keys[key]], other[key]) for key in keys)
    if isinstance(one, (set, frozenset)):
        return bool({twins.get(id(key), key) for key in one} == other)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return equal(one.__reduce_ex__(4), other.__reduce_ex__(4))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal, where all NaN are."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if torch.equal(*(each.detach().reshape(-1).view(torch.uint8) for each in (one, other))):
        return True
    nan = one.isnan() & other.isnan()
    return bool(nan.any()) and _same_bits(one.masked_fill(nan, 0), other.masked_fill(nan, 0))


@contextlib.contextmanager
def _random_numbers_refused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Restore random generators on exit, and raise if they were used."""
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
    states, used = [get() for get, _ in sources], False
    try:
        yield
    finally:
        for (get, put), state in zip(sources, states, strict=True):
            if not _equal(get(), state, {}):
                put(state)
                used = True
    if used:
        text = "draws random numbers, which are others in another order"
        raise refusal(f"the step of {type(optimizer).__name__} {text}")


def _collectives_refused(optimizer: str) -> Any:
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
