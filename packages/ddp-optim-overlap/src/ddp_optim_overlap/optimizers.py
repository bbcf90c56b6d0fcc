"""The user's optimizers while their steps are overlapped: what steps them, and what step() means then."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ddp_optim_overlap.clipping import ClipPolicy
from ddp_optim_overlap.engine import Engine, Stepping
from ddp_optim_overlap.errors import ConfigError
from ddp_optim_overlap.partial_steps import PartialSteps
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
        self._stepped: set[torch.optim.Optimizer] = set()
        self._idle = _IdleStep()
        self._pre_hooks: list[int] = []
        self._handles: list[Any] = []

    def stepping(self) -> Stepping:
        """Return what an engine needs."""
        clip = self._clip
        return Stepping(
            step=self._step_whole if self._whole else self._step_bucket,
            whole=self._whole,
            begin=self._begin,
            norm=lambda: None if clip is None else clip.norm,
        )

    def attach(self, engine: Engine) -> None:
        """Begin to take part in ``optimizer.step()``."""
        self._engine = weakref.ref(engine)  # which has this: together they would be a cycle
        for optimizer in self._optimizers:
            # Neither the engine nor its thread may live on with an optimizer whose model is gone.
            before, after = register_first_step_hooks(
                optimizer, _weakly(self._before_step), _weakly(self._after_step)
            )
            self._handles += [before, after]
            self._pre_hooks.append(before.id)

    def remove(self) -> None:
        """Leave ``optimizer.step()`` as it was."""
        for handle in self._handles:
            handle.remove()
        self._stepped.clear()

    def finish(self) -> None:
        """A backward pass that has stepped is over."""
        self._partial.finish()
        engine = self._engine()
        if engine is not None:
            engine.stepped_gradients.remember(self._partial.parameters)
        self._stepped = set(self._optimizers)
        for optimizer in self._optimizers:
            mark_stepped(optimizer)

    def _begin(self) -> None:
        self._partial.begin()
        if self._clip is not None:
            self._clip.begin()
        self.refuse_pre_hooks()

    def refuse_pre_hooks(self) -> None:
        """Raise if a step pre-hook would run too late.

        Raises:
            ConfigError: An optimizer that is stepped by buckets has one.
        """
        for optimizer in () if self._whole else self._optimizers:
            if any(number not in self._pre_hooks for number in step_pre_hooks(optimizer)):
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
        try:
            if self._scaler is not None:
                for optimizer in self._optimizers:
                    self._scaler.unscale_(optimizer)
            if self._clip is not None:
                self._clip.clip(self._model)
            for optimizer in self._optimizers:
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
        engine.raise_error()
        engine.require_complete()
        if optimizer not in self._stepped:
            return  # an ordinary step, after pause() or no_sync() or once more
        if args[1:] or any(value is not None for value in kwargs.values()):
            raise ConfigError("the parameters are stepped already: a closure would come too late")
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if engine.stepped_gradients.changed(own):
            raise ConfigError(
                "gradients were changed (clipped, unscaled, ...) between backward() and step(), after the "
                "step had used them: give clip= or scaler= to overlap_optimizer instead"
            )
        self._stepped.discard(optimizer)
        self._idle.begin(optimizer, silent=self._whole)

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

    def begin(self, optimizer: torch.optim.Optimizer, *, silent: bool) -> None:
        """Empty the groups; if ``silent``, keep the user's post-hooks, which have run, from running again."""
        self._depth = 1
        self._groups = [dict(group) for group in optimizer.param_groups]
        self._attributes = dict(optimizer.__dict__)
        for group in optimizer.param_groups:
            group["params"] = []
        if silent:
            silence_step_post_hooks(optimizer, self.end)

    def again(self) -> bool:
        """Whether such a call is in progress, and has just reached the hooks once more."""
        self._depth += bool(self._depth)
        return self._depth > 0

    def end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Put everything back, a counter of calls too."""
        if self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            optimizer.__dict__.clear()
            optimizer.__dict__.update(self._attributes)
            for group, before in zip(optimizer.param_groups, self._groups, strict=True):
                group.clear()
                group.update(before)
            self._groups, self._attributes = [], {}


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*args)

    return call
