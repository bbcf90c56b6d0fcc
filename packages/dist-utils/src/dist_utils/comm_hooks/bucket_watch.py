"""Notice optimizer steps with gradients that were not averaged.

``DistributedDataParallel`` averages nothing, without a word, in a pass that it does not know of. What answers
for its average sees whether buckets come: a gradient that came in a pass without buckets is a rank's own.
"""

from __future__ import annotations

import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dist_utils import torch_compat
from dist_utils.torch_compat import inside_backward

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
    have a gradient in a step, either, except zeros.

    If no bucket has ever come and the model has another hook, or none, its gradients are probably averaged
    without the hook of this watch. A warning says so, once.

    A bucket is enough for all gradients of its pass, as ``DistributedDataParallel`` averages all or none. It
    averages none if it has waited in vain for some of its parameters, which it would tell in the next forward
    pass only: that is an error, too.

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
        Two microseconds in ``optimizer.step()`` and some nanoseconds for each of its parameters; half a
        microsecond for each parameter in a backward pass.

    Example:
        >>> watch = BucketWatch(ddp, "MyState", state)  # doctest: +SKIP
        >>> watch.bucket_came()  # for every bucket # doctest: +SKIP
    """

    def __init__(self, ddp: DistributedDataParallel, state: str, owner: object | None = None) -> None:
        self.state = state
        self._owner = None if owner is None else weakref.ref(owner)
        self._passes: _Passes | None = None
        if ddp.process_group.size() > 1 and _gives_buckets(ddp):
            self._passes = _passes_of(ddp)
            self._passes.watches.add(self)

    def bucket_came(self) -> None:
        """Note that DDP has handed over a bucket, so that all gradients so far are averaged.

        At the end of such a pass, call it again if not every bucket comes to the same hook.
        """
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


class _Stepped(NamedTuple):
    """What an optimizer steps of a model.

    Attributes:
        everything: All that it steps, of this model and of others, by id.
        averaged: Whether a bucket of the model holds some of it.
        outside: The parameters of the model that no bucket holds.
    """

    everything: tuple[int, ...]
    averaged: bool
    outside: list[torch.Tensor]


class _Passes:
    """What backward passes of a model have left behind.

    Attributes:
        averaged: The parameters that DDP averages, by id.
        came: Whether a bucket has ever come.
        unaveraged: Names of parameters that got a gradient after the last bucket, by id.
        watches: For whom this looks.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.came = False
        self.unaveraged: dict[int, str] = {}
        self.watches: set[BucketWatch] = set()
        self._nodes: dict[int, Any] = {}
        """Those that accumulate gradients, to which DDP listens, if it may take parameters for unused. Each
        keeps its parameter alive."""
        self._unheard: set[int] = set()
        """The parameters that have another node since: DDP takes them for unused."""
        self._stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = (
            weakref.WeakKeyDictionary()
        )
        nodes, stepped = self._nodes, self._stepped  # both hold parameters

        def free(_: object) -> None:
            nodes.clear()
            stepped.clear()

        self._ddp = weakref.ref(ddp, free)  # a watch may live longer than its model
        averaged = _averaged_parameters(ddp)
        may_be_unused = ddp.find_unused_parameters or ddp.static_graph  # that one in its first pass
        self.averaged = frozenset(map(id, averaged))
        self._hooks = [
            self._listen_to(name, parameter, may_be_unused=may_be_unused)
            for parameter, name in averaged.items()
            if parameter.is_floating_point() or parameter.is_complex()
        ]

    def bucket_came(self) -> None:
        """Note that all gradients of the model so far are averaged."""
        self.came = True
        if not self._unheard:
            self.unaveraged.clear()
            if len(_watched) == 1 and self._hooks:  # there is no other: this has not ended
                return
        for passes in _watched:  # another model may have some of the parameters, too
            for one in (passes.unaveraged.keys() & self.averaged) - self._unheard:
                passes.unaveraged.pop(one, None)  # its own thread may have removed it

    def belongs_to(self, ddp: DistributedDataParallel | None) -> bool:
        """Return whether this looks at a model; at ``None``: whether its model is gone."""
        return self._ddp() is ddp

    def end(self) -> None:
        """Stop looking."""
        with _changing:
            _watch_instead(one for one in _watched if one is not self)
            while self._hooks:
                self._hooks.pop().remove()
        self.unaveraged.clear()
        self._nodes.clear()

    def require_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer would step a gradient of this model that was not averaged.

        Raises:
            UnaveragedGradientsError: It would.
        """
        if not self.watches or self.belongs_to(None):
            self.end()
            return
        ddp, stepped = self._ddp(), self._stepped_by(optimizer)
        # Another thread may be in a pass of another model: DDP would answer at its end, when the ranks meet.
        waits = ddp is not None and stepped.averaged and not inside_backward() and not _is_finished(ddp)
        if (self.unaveraged or waits) and (found := self._unaveraged_in(optimizer, every=waits)):
            del ddp
            gc.collect()  # a model is part of cycles: an earlier one may only seem to exist
            if (ddp := self._ddp()) is not None:
                self._refuse(ddp, found, waits=waits)
        elif outside := [one for one in stepped.outside if _has_gradient(one)]:
            self._refuse_outside(outside)

    def _listen_to(self, name: str, parameter: torch.Tensor, *, may_be_unused: bool) -> RemovableHandle:
        ddp_of, unaveraged, key = self._ddp, self.unaveraged, id(parameter)

        def got_gradient(_: torch.Tensor) -> None:
            ddp = ddp_of()
            if ddp is not None and ddp.require_backward_grad_sync:  # outside of no_sync()
                unaveraged[key] = name

        hook: Callable[[torch.Tensor], None] = got_gradient
        trained = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one, which may be unfrozen later, cannot have a hook
        if may_be_unused:
            self._nodes[key] = torch.autograd.graph.get_gradient_edge(parameter).node
            hook = self._with_node(key, got_gradient)
        register: Any = parameter.register_post_accumulate_grad_hook
        handle: RemovableHandle = register(hook)
        parameter.requires_grad_(trained)
        return handle

    def _with_node(
        self, key: int, got_gradient: Callable[[torch.Tensor], None]
    ) -> Callable[[torch.Tensor], None]:
        """Return a hook that notices, too, if DDP does not hear of a gradient, and takes it for unused.

        DDP then hands over a bucket in which it has zeros, and leaves ``.grad`` alone. It listens to the node
        that the parameter had when DDP was made, and one that changes its dtype gets another node. No public
        name for the node up to torch 2.15.
        """
        passes_of, purpose = weakref.ref(self), "noticing gradients that DDP takes for unused"
        current_node = torch_compat.private("torch._C", "_current_autograd_node", purpose)

        def hook(parameter: torch.Tensor) -> None:
            passes = passes_of()
            if passes is not None and current_node() is not passes._nodes.get(key):  # noqa: SLF001
                passes._unheard.add(key)  # noqa: SLF001
            got_gradient(parameter)

        return hook

    def _unaveraged_in(self, optimizer: torch.optim.Optimizer, *, every: bool) -> dict[int, str]:
        """Return the names of an optimizer's parameters whose gradient is a rank's own, by id.

        Args:
            optimizer: Steps them.
            every: Whether all gradients are a rank's own.
        """
        ddp = self._ddp()
        if ddp is None:
            return {}
        candidates = self.averaged if every else self.unaveraged.keys()
        looked_at = candidates & set(map(id, _parameters_of(optimizer)))  # an unrelated optimizer has none
        found = {}
        for name, parameter in ddp.module.named_parameters() if looked_at else ():
            if id(parameter) not in looked_at:
                continue
            if _has_gradient(parameter):
                found[id(parameter)] = name
            else:
                self.unaveraged.pop(id(parameter), None)  # it was not for a step
        return found

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> _Stepped:
        """Return what an optimizer steps of the model."""
        everything = tuple(map(id, _parameters_of(optimizer)))
        known = self._stepped.get(optimizer)
        if known is None or known.everything != everything:
            others = [one for one in _parameters_of(optimizer) if id(one) not in self.averaged]
            members = self._names_not_averaged() if others else {}
            outside = [one for one in others if id(one) in members]
            known = _Stepped(everything, not self.averaged.isdisjoint(everything), outside)
            self._stepped[optimizer] = known
        return known

    def _names_not_averaged(self) -> dict[int, str]:
        """Return the names of the model's parameters that no bucket holds and DDP does not ignore, by id."""
        ddp = self._ddp()
        if ddp is None:
            return {}
        return {
            id(parameter): name
            for parameter, name in _parameters_not_ignored(ddp).items()
            if id(parameter) not in self.averaged
        }

    def _refuse(self, ddp: DistributedDataParallel, unaveraged: dict[int, str], *, waits: bool) -> None:
        states = ", ".join(sorted({watch.state for watch in [*self.watches]}))
        if not self.came and not any(watch.is_registered(ddp) for watch in [*self.watches]):
            self.end()
            warnings.warn(
                f"an optimizer steps, and the communication hook of the {states} that is bound to the model "
                "has got no bucket: it is not registered with the DistributedDataParallel module, and "
                "gradients are averaged without it or not at all. Call register_comm_hook(state, hook) of "
                "the module that trains, where a framework does not",
                stacklevel=2,
            )
            return
        if waits:
            why = (
                "DistributedDataParallel averages none before all its parameters have one: others got none "
                "(use or freeze them, or set find_unused_parameters=True), or the model was moved, cast or "
                "changed after DDP was made (do it before)"
            )
        elif not self._unheard.isdisjoint(unaveraged):
            why = (
                "DistributedDataParallel takes them for unused: the model was moved, cast or changed after "
                "DDP was made (do it before)"
            )
        else:
            why = (
                f"DistributedDataParallel has handed over no bucket to {states} since. It hands over none in "
                "these cases: static_graph=True with a forward pass that returns an object in which DDP "
                "finds no tensor (return a tensor, tuple or dict); a forward pass of ddp.module or a part of "
                "it instead of ddp; a model that was moved, cast or changed after DDP was made (do it "
                "before); a forward pass inside no_sync() with backward() outside (put both inside); a "
                "second backward() without a forward pass of ddp since the first one (add the losses, or let "
                "each backward() follow its forward pass); a second DistributedDataParallel around the "
                "model. If ranks are to step on their own, or have the same gradients, run backward() inside "
                "no_sync()"
            )
        names = list(unaveraged.values())
        raise _error(
            "an optimizer was to step with gradients that were not averaged: a backward pass has given some "
            f"to {_some(names)} (and perhaps to others), and {why}",
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


_watched: tuple[_Passes, ...] = ()
"""Those of all models. Replaced as a whole: threads that train go through it at any time."""

_changing = threading.RLock()


def _watch_instead(passes: Iterable[_Passes]) -> None:
    """Let these be all that is watched. The lock must be held."""
    global _watched  # noqa: PLW0603
    _watched = tuple(passes)


def _passes_of(ddp: DistributedDataParallel) -> _Passes:
    """Return the passes of a model; those of models of which it has all parameters end."""
    with _changing:
        passes = next((one for one in _watched if one.belongs_to(ddp)), None)
        if passes is None:
            passes = _Passes(ddp)
            for earlier in _watched:
                if earlier.averaged <= passes.averaged or earlier.belongs_to(None):
                    earlier.end()
            _look_at_steps()
            _watch_instead([*_watched, passes])
        return passes


def _error(text: str, names: list[str]) -> UnaveragedGradientsError:
    error = UnaveragedGradientsError(text)
    error.parameters = tuple(names)
    return error


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more


def _has_gradient(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has a gradient that is not zero."""
    gradient = parameter.grad
    if gradient is None:
        return False
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())


def _parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _parameters_not_ignored(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the parameters that DDP was not told to ignore, found as DDP itself finds them, with names."""
    return {
        parameter: f"{module_name}.{name}".lstrip(".")
        for module_name, module in ddp.module.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if f"{module_name}.{name}" not in ddp.parameters_to_ignore
    }


def _averaged_parameters(ddp: DistributedDataParallel) -> dict[torch.Tensor, str]:
    """Return the parameters that a model's buckets hold: those that required gradients when DDP was made.

    If some were frozen or unfrozen since, it cannot be told which, and all that DDP does not ignore are
    returned. The number of those in buckets has no public name up to torch 2.15.
    """
    parameters = _parameters_not_ignored(ddp)
    trained = {one: name for one, name in parameters.items() if one.requires_grad}
    facts = torch_compat.private(ddp, "_get_ddp_logging_data", "noticing gradients in no bucket")()
    return trained if len(trained) == facts.get("num_parameter_tensors") else parameters


def _is_finished(ddp: DistributedDataParallel) -> bool:
    """Return whether DDP has all gradients that it waits for. No public name up to torch 2.15."""
    check = torch_compat.private(ddp, "_check_reducer_finalized", "noticing gradients without an average")
    try:
        check()
    except RuntimeError:
        return False
    return True


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
    if torch.compiler.is_compiling() or not _watched:
        return None
    if not any(map(_may_be_closure, [*args[1:], *kwargs.values()])):
        _require_averaged(optimizer)
        return None
    # The closure runs the backward passes.
    checked = [_checked(optimizer, one) if _may_be_closure(one) else one for one in args[1:]]
    named = {name: _checked(optimizer, one) if _may_be_closure(one) else one for name, one in kwargs.items()}
    return (args[0], *checked), named


_before_step.guards = True  # type: ignore[attr-defined] # for who asks: it changes nothing that a step uses


def _may_be_closure(argument: object) -> bool:
    """Return whether an argument of a step is called for a loss; some optimizers also take a model."""
    return callable(argument) and not isinstance(argument, (torch.nn.Module, type))


def _checked(optimizer: torch.optim.Optimizer, closure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(closure)
    def run(*args: Any, **kwargs: Any) -> Any:  # a user's optimizer may give it some
        loss = closure(*args, **kwargs)
        _require_averaged(optimizer)
        return loss

    return run


def _require_averaged(optimizer: torch.optim.Optimizer) -> None:
    for passes in _watched:
        passes.require_averaged(optimizer)
