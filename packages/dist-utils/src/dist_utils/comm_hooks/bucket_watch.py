"""Notice optimizer steps with gradients that were not averaged.

``DistributedDataParallel`` averages nothing, without a word, in a pass that it does not know of. What answers
for its average sees whether buckets come: a gradient that came in a pass without buckets is a rank's own.
"""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dist_utils import torch_compat

_WATCHED = 256
"""At most so many parameters of a model have a hook, which takes half a microsecond in every pass."""

_NAMED = 3
"""Parameters that a message names."""


class UnaveragedGradientsError(RuntimeError):
    """An optimizer was about to step with gradients that are one rank's own, so that ranks would drift apart.

    Attributes:
        parameters: Names of parameters with such a gradient; others may have one, too.
    """

    parameters: tuple[str, ...] = ()


class BucketWatch:
    """Raise in ``optimizer.step()`` if gradients of a model were not averaged, though they should have been.

    A pass counts if it runs outside of ``no_sync()``: the gradients that it gives to parameters must come in
    a bucket before the step, in that pass or in a later one, as ``DistributedDataParallel`` averages all that
    has been accumulated. Gradients that were set to zero or ``None``, set by hand, or belong to parameters
    that DDP was told to ignore do not count. Nor do those of parameters that are not in the optimizer.

    A parameter that is in no bucket, because it was frozen when DDP was made or was added later, must not
    have a gradient in a step, either.

    If no bucket has ever come and the model has another hook, or none, its gradients are probably averaged
    without the hook of this watch. A warning says so, once.

    Watches of one model share what they see, so that a bucket for any of them will do. Of models that share
    some of their parameters, a bucket for any watch will do for these. A later model with all parameters of
    an earlier one takes them over. Not seen are steps of optimizers that are no ``torch.optim.Optimizer``,
    and steps that ``torch.compile`` has compiled. DDP's Python reducer has no buckets and is not watched, nor
    is a single rank.

    Args:
        ddp: The model. Not kept alive by the watch; it keeps the watch alive until that ends.
        state: The name of what answers for the average, for messages.
        owner: What is given to ``register_comm_hook`` as the state, if that is known. Not kept alive.

    Cost:
        Two microseconds in ``optimizer.step()``, and in a backward pass half a microsecond for each of at
        most 256 parameters. In a model with more modules than that, only every n-th is looked at: a pass
        through a few neighboring ones alone may be missed.

    Example:
        >>> watch = BucketWatch(ddp, "MyState", state)  # doctest: +SKIP
        >>> watch.bucket_came()  # for every bucket # doctest: +SKIP
    """

    def __init__(self, ddp: DistributedDataParallel, state: str, owner: object | None = None) -> None:
        self.state = state
        self.paused = False
        """Passes meanwhile do not count, as those inside ``no_sync()``."""
        self._owner = None if owner is None else weakref.ref(owner)
        self._passes: _Passes | None = None
        if ddp.process_group.size() > 1 and _gives_buckets(ddp):
            self._passes = _passes_of(ddp)
            self._passes.watches.add(self)

    def bucket_came(self) -> None:
        """Note that DDP has handed over a bucket, so that all gradients so far are averaged."""
        if self._passes is not None:
            self._passes.bucket_came()

    def end(self) -> None:
        """Stop watching."""
        if self._passes is not None:
            self._passes.watches.discard(self)
            self._passes = None

    def is_registered(self, ddp: DistributedDataParallel) -> bool:
        """Return whether the owner is the state of a hook of this model.

        No public name up to torch 2.15.
        """
        owner = None if self._owner is None else self._owner()
        hooks = torch_compat.private(ddp, "_comm_hooks", "telling hooks that are not in use")
        return owner is not None and any(state is owner for _, state in hooks)


class _Passes:
    """What backward passes of a model have left behind.

    Attributes:
        averaged: The parameters that DDP averages, by id.
        came: Whether a bucket has ever come.
        unaveraged: Names of watched parameters that got a gradient after the last bucket, by id.
        watches: For whom this looks.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = weakref.ref(ddp)
        self.came = False
        self.unaveraged: dict[int, str] = {}
        self.watches: set[BucketWatch] = set()
        self.averaged = frozenset(map(id, _averaged_parameters(ddp)))
        self._outside: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[torch.Tensor]]] = (
            weakref.WeakKeyDictionary()
        )
        watched = list(self._first_of_each_module(ddp.module))
        every = -(-len(watched) // _WATCHED)
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(name))  # type: ignore[no-untyped-call]
            for name, parameter in watched[:: every or 1]
        ]

    def bucket_came(self) -> None:
        """Note that all gradients of the model so far are averaged."""
        self.came = True
        self.unaveraged.clear()
        if len(_of_models) == 1:
            return
        for passes in _of_models.values():  # another model may have some of the parameters, too
            for one in passes.unaveraged.keys() & self.averaged:
                del passes.unaveraged[one]

    def end(self) -> None:
        """Stop looking."""
        while self._hooks:
            self._hooks.pop().remove()
        self.unaveraged.clear()
        ddp = self._ddp()
        if ddp is not None:
            _of_models.pop(ddp, None)

    def require_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer would step a gradient of this model that was not averaged.

        Raises:
            UnaveragedGradientsError: It would.
        """
        if not self.watches:
            self.end()
        elif self.unaveraged and (names := self._unaveraged_in(optimizer)):
            gc.collect()  # a model is part of cycles: an earlier one may only seem to exist
            if (ddp := self._ddp()) is not None:
                self._refuse(ddp, names)
        elif outside := [one for one in self._parameters_outside(optimizer) if one.grad is not None]:
            self._refuse_outside(outside)

    def _first_of_each_module(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the first averaged parameter of every module, with its name; others come in the same pass."""
        seen: set[int] = set()
        for prefix, child in module.named_modules():
            for name, parameter in child.named_parameters(prefix, recurse=False):
                if id(parameter) in self.averaged and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter
                    break

    def _hook(self, name: str) -> Any:
        ddp_of, watches, unaveraged = self._ddp, self.watches, self.unaveraged

        def got_gradient(parameter: torch.Tensor) -> None:
            ddp = ddp_of()
            if ddp is None or not ddp.require_backward_grad_sync:  # inside no_sync()
                return
            for watch in watches:  # it runs for many parameters in every pass: any() takes twice as long
                if watch.paused:
                    return
            unaveraged[id(parameter)] = name

        return got_gradient

    def _unaveraged_in(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Return the names of watched parameters of an optimizer whose gradient is a rank's own."""
        ddp = self._ddp()
        if ddp is None:
            return []
        in_step = set(map(id, _parameters_of(optimizer)))
        found = []
        for name, parameter in ddp.module.named_parameters():
            if id(parameter) not in self.unaveraged:
                continue
            if parameter.grad is None or _is_zero(parameter.grad):
                del self.unaveraged[id(parameter)]  # it was not for a step
            elif id(parameter) in in_step:
                found.append(name)
        return found

    def _parameters_outside(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Return the parameters of the model that an optimizer steps and no bucket holds."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._outside.get(optimizer)
        if known is None or known[0] != count:
            others = [one for one in _parameters_of(optimizer) if id(one) not in self.averaged]
            members = self._names_not_averaged() if others else {}
            known = self._outside[optimizer] = count, [one for one in others if id(one) in members]
        return known[1]

    def _names_not_averaged(self) -> dict[int, str]:
        """Return the names of the model's parameters that no bucket holds and DDP does not ignore, by id."""
        ddp = self._ddp()
        if ddp is None:
            return {}
        return {
            id(parameter): name
            for name, parameter in ddp.module.named_parameters()
            if id(parameter) not in self.averaged and name not in ddp.parameters_to_ignore
        }

    def _refuse(self, ddp: DistributedDataParallel, names: list[str]) -> None:
        states = ", ".join(sorted({watch.state for watch in self.watches}))
        if not self.came and not any(watch.is_registered(ddp) for watch in self.watches):
            self.end()
            warnings.warn(
                f"an optimizer steps, and the communication hook of the {states} that is bound to the model "
                "has got no bucket: it is not registered with the DistributedDataParallel module, and "
                "gradients are averaged without it or not at all. Call register_comm_hook(state, hook) of "
                "the module that trains, where a framework does not",
                stacklevel=2,
            )
            return
        raise _error(
            f"an optimizer was to step with gradients that were not averaged: a backward pass has given some "
            f"to {_some(names)} (and perhaps to others), and DistributedDataParallel has handed over no "
            f"bucket to {states} since. It hands over none in these cases: static_graph=True with a forward "
            "pass that returns an object in which DDP finds no tensor (return a tensor, tuple or dict); a "
            "forward pass of ddp.module or a part of it instead of ddp; a model that was moved, cast or "
            "changed after DDP was made (do it before); a forward pass inside no_sync() with backward() "
            "outside (put both inside); a second DistributedDataParallel around the model. If ranks are to "
            "step on their own, run backward() inside no_sync()",
            names,
        )

    def _refuse_outside(self, outside: list[torch.Tensor]) -> None:
        members = self._names_not_averaged()
        names = [members[id(one)] for one in outside if id(one) in members]
        if names:
            raise _error(
                f"an optimizer was to step with gradients that were not averaged: {_some(names)} got one and "
                "came in no bucket. DistributedDataParallel averages the parameters that it found when it "
                "was made, if they required gradients: unfreeze or add parameters before, or make a new one. "
                "If you average them yourself, add their names to ddp.parameters_to_ignore",
                names,
            )


_of_models: weakref.WeakKeyDictionary[DistributedDataParallel, _Passes] = weakref.WeakKeyDictionary()


def _passes_of(ddp: DistributedDataParallel) -> _Passes:
    """Return the passes of a model; those of models of which it has all parameters end."""
    passes = _of_models.get(ddp)
    if passes is None:
        passes = _Passes(ddp)
        for earlier in list(_of_models.values()):
            if earlier.averaged <= passes.averaged:
                earlier.end()
        _look_at_steps()
        _of_models[ddp] = passes
    return passes


def _error(text: str, names: list[str]) -> UnaveragedGradientsError:
    error = UnaveragedGradientsError(text)
    error.parameters = tuple(names)
    return error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _is_zero(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return not values.count_nonzero()


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _averaged_parameters(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters that a model's buckets hold: those that required gradients when DDP was made.

    If some were frozen or unfrozen since, it cannot be told which, and all that DDP does not ignore are
    returned. The number of those in buckets has no public name up to torch 2.15.
    """
    parameters = [one for name, one in ddp.module.named_parameters() if name not in ddp.parameters_to_ignore]
    trained = [one for one in parameters if one.requires_grad]
    facts = torch_compat.private(ddp, "_get_ddp_logging_data", "noticing gradients in no bucket")()
    return trained if len(trained) == facts.get("num_parameter_tensors") else parameters


def _gives_buckets(ddp: DistributedDataParallel) -> bool:
    """Return whether a model gives its hook buckets, which DDP's Python reducer does not.

    No public name up to torch 2.15.
    """
    return not torch_compat.private(ddp, "_use_python_reducer", "noticing hooks that get no bucket")


@functools.cache
def _look_at_steps() -> None:
    """From now on, look at every step of an optimizer: before it, and after its closure has run."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    if torch.compiler.is_compiling() or not _of_models:
        return None
    if not any(map(callable, [*args[1:], *kwargs.values()])):
        _require_averaged(optimizer)
        return None
    # The closure runs the backward passes.
    checked = [_checked(optimizer, one) if callable(one) else one for one in args[1:]]
    named = {name: _checked(optimizer, one) if callable(one) else one for name, one in kwargs.items()}
    return (args[0], *checked), named


_before_step.guards = True  # type: ignore[attr-defined] # for who asks: it changes nothing that a step uses


def _checked(optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
    @functools.wraps(closure)
    def run() -> Any:
        loss = closure()
        _require_averaged(optimizer)
        return loss

    return run


def _require_averaged(optimizer: torch.optim.Optimizer) -> None:
    for passes in list(_of_models.values()):
        passes.require_averaged(optimizer)
