"""The user's optimizers while their steps are overlapped: what steps them, and what step() means then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.engine import Engine, Stepping
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.partial_steps import PartialSteps, parameters_of, stand_in
from ddp_optim_overlap.stepped_gradients import StepInputs
from dist_utils.torch_compat import (
    mark_stepped,
    register_first_step_hooks,
    silence_step_post_hooks,
    step_pre_hooks,
)

__all__ = ["OverlappedOptimizers"]


class OverlappedOptimizers:
    """Steps optimizers for an engine, and makes the loop's own ``optimizer.step()`` harmless.

    The first ``optimizer.step()`` after a backward pass that has stepped finds nothing left to do. It
    runs the optimizer's step hooks, checks that nobody has changed gradients in vain, and raises errors
    with their type. Any other call is an ordinary step.

    Args:
        optimizers: The user's.
        model: The parameters whose gradients count for clipping.
        whole: Step everything at once, by ``optimizer.step()`` itself.
        clip: Limits gradients before a step.
        scaler: Unscales them before that.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        model: Sequence[torch.Tensor],
        whole: bool,
        clip: ClipPolicy | None,
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        self._optimizers = optimizers
        self._model = model
        self._whole = whole
        self._clip = clip
        self._scaler = scaler
        self._partial = PartialSteps(optimizers)
        self._engine: Callable[[], Engine | None] = lambda: None
        self._stepping_now = False
        self._begun = 0
        self._stepped: dict[torch.optim.Optimizer, StepInputs] = {}
        self._idle = _IdleStep()
        self._handles: list[Any] = []

    def stepping(self) -> Stepping:
        """Return what an engine needs."""
        clip = self._clip
        return Stepping(
            step=self._step_whole if self._whole else self._step_bucket,
            whole=self._whole,
            begin=self._begin,
            norm=lambda: None if clip is None else clip.norm,
            begun=lambda: self._begun,
        )

    def attach(self, engine: Engine) -> None:
        """Begin to take part in ``optimizer.step()``."""
        self._engine = weakref.ref(engine)  # which has this: together they would be a cycle
        for optimizer in self._optimizers:
            # Neither the engine nor its thread may live on with an optimizer whose model is gone.
            self._handles += register_first_step_hooks(
                optimizer, _WeakCall(self._before_step), _WeakCall(self._after_step)
            )

    def remove(self) -> None:
        """Leave ``optimizer.step()`` as it was; a step that is done already stays done."""
        engine = self._engine()
        if self._stepped and engine is not None and engine.step_stands:
            return
        for handle in self._handles:
            handle.remove()
        self._stepped.clear()

    def finish(self) -> None:
        """A backward pass that has stepped is over."""
        self._partial.finish()
        engine = self._engine()
        if engine is not None:
            engine.stepped_gradients.remember(self._partial.parameters)
        self._stepped = {optimizer: StepInputs(optimizer) for optimizer in self._optimizers}
        for optimizer in self._optimizers:
            mark_stepped(optimizer)

    def _begin(self) -> None:
        self._idle.restore()
        self._partial.begin()
        self._refuse_foreign()
        if self._clip is not None:
            self._clip.begin()
        self.refuse_pre_hooks()

    def _refuse_foreign(self) -> None:
        """Raise if the optimizers have got parameters that DDP does not average."""
        engine = self._engine()
        if engine is None or not engine.averaged:  # in the first pass nobody knows
            return
        for parameter in self._partial.parameters:
            if parameter.requires_grad and parameter not in engine.averaged:
                raise ConfigError(
                    f"an optimizer has a parameter, of shape {tuple(parameter.shape)}, that this DDP model "
                    "does not average, as it is not the model's or was frozen when DDP was made: it would "
                    "never be stepped. Give it an optimizer of its own, or make the DDP model anew"
                )

    def refuse_pre_hooks(self) -> None:
        """Raise if a step pre-hook would run too late.

        Raises:
            ConfigError: An optimizer that is stepped by buckets has one.
        """
        for optimizer in () if self._whole else self._optimizers:
            if any(not isinstance(hook, _WeakCall) for hook in step_pre_hooks(optimizer).values()):
                raise ConfigError(
                    f"{type(optimizer).__name__} has a step pre-hook, which may change gradients and would "
                    "run after they were used: use OverlapMode.AFTER_REDUCE"
                )

    def _step_bucket(self, parameters: Sequence[torch.Tensor]) -> None:
        if self._clip is not None:
            self._clip.clip(parameters)
        self._partial.step(parameters)

    def _step_whole(self, parameters: Sequence[torch.Tensor]) -> None:
        del parameters  # the optimizers know theirs, and their gradients are in place
        self._stepping_now = True
        self._begun = 0
        try:
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    self._scaler.unscale_(optimizer)
            if self._clip is not None:
                self._clip.clip(self._model)
            for optimizer in self._optimizers:
                self._begun += 1
                if self._scaler is not None:
                    self._scaler.step(optimizer)
                else:
                    optimizer.step()
        finally:
            self._stepping_now = False

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        engine = self._engine()
        if self._stepping_now or engine is None or self._idle.again():
            return
        if not engine.removed:
            engine.raise_error()
            engine.require_complete()
        if not engine.step_stands or optimizer not in self._stepped:
            return  # an ordinary step, after pause() or no_sync() or once more
        _refuse_arguments(args, kwargs)
        own = parameters_of(optimizer)
        changed = self._stepped[optimizer].changed(optimizer)
        if changed is None and engine.stepped_gradients.changed(own):
            changed = "gradients were changed (clipped, unscaled, ...)"
        if changed is None and getattr(optimizer, "found_inf", None) is not None:
            changed = "a GradScaler called step()"
        if changed is not None:
            raise ConfigError(
                f"{changed} between backward() and step(), after the step had been done: do it before "
                "backward() or after step(), or give clip= or scaler= to overlap_optimizer instead"
            )
        self._idle.begin(optimizer, silent=self._whole)
        del self._stepped[optimizer]
        if engine.removed and not self._stepped:
            engine.stop_observing()

    def _after_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        del args, kwargs
        self._idle.end(optimizer)


class _IdleStep:
    """Lets a call of ``optimizer.step()`` find no parameters, and leave nothing behind."""

    def __init__(self) -> None:
        self._depth = 0  # a subclass whose step calls its parent's runs the hooks twice
        self._groups: list[dict[str, Any]] = []
        self._attributes: dict[str, Any] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._rehearsed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def begin(self, optimizer: torch.optim.Optimizer, *, silent: bool) -> None:
        """Empty the groups; if ``silent``, keep the user's post-hooks, which have run, from running again.

        Raises:
            ConfigError: The optimizer's step cannot do without parameters. Its groups are as before.
        """
        self._depth = 1
        self._optimizer = optimizer
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._attributes = dict(optimizer.__dict__)
        for group in optimizer.param_groups:
            group["params"] = []
        if optimizer not in self._rehearsed:
            try:
                # Nobody could put the groups back if the step itself failed: no hook is called then.
                stand_in(optimizer, optimizer.param_groups).step()
            except Exception as error:
                self.restore()
                raise ConfigError(
                    f"the parameters are stepped already, and {type(optimizer).__name__}.step() fails when "
                    f"it has none to step ({type(error).__name__}: {error}): leave step() out of the loop"
                ) from error
            self._rehearsed.add(optimizer)
        if silent:
            silence_step_post_hooks(optimizer, self.end)

    def again(self) -> bool:
        """Whether such a call is in progress, and has just reached the hooks once more."""
        self._depth += bool(self._depth)
        return self._depth > 0

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Put everything back, a counter of calls too."""
        del optimizer
        if self._depth == 1:
            self.restore()
        self._depth = max(0, self._depth - 1)

    def restore(self) -> None:
        """Put everything back at once, if that is still to be done: such a call may have failed."""
        optimizer, self._optimizer, self._depth = self._optimizer, None, 0
        if optimizer is not None:
            optimizer.__dict__.clear()
            optimizer.__dict__.update(self._attributes)
            for group, before in zip(optimizer.param_groups, self._groups, strict=True):
                group.clear()
                group.update(before)
            self._groups, self._attributes = [], {}


def _refuse_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = {name: value for name, value in kwargs.items() if value is not None}
    if args[1:] or "closure" in given:
        raise ConfigError("the parameters are stepped already: a closure would come too late")
    if given:
        raise ConfigError(
            f"the parameters are stepped already: {', '.join(given)} for step() would come too late"
        )


class _WeakCall:
    """Calls a bound method as long as its object lives."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> None:
        alive = self._method()
        if alive is not None:
            alive(*args)
