"""Which parameters get gradients, and which gradients a step has used up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ddp_optim_overlap.errors import DoubleBackwardError
from dist_utils.torch_compat import gradient_marks

__all__ = ["GradientWatch"]

GradientMark = tuple[int, int] | None


class GradientWatch:
    """Notice every gradient of some parameters, and refuse one that is added to what a step has used.

    No gradients are kept, so that setting them to ``None`` frees them: only where each one lies in memory,
    and its version, which every write in place raises.

    Each parameter has a hook that sees a gradient when it has been added, and at the beginning a second one
    that looks before. When the first gradient comes after a step, those that the step has used are gone, as a
    rule: then only the parameter of the first one keeps its second hook. One that still has a gradient, be it
    zeros, keeps it or gets it again.

    Args:
        parameters: To watch from the beginning.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._parameters: list[torch.Tensor] = []
        self._positions: dict[torch.Tensor, int] = {}
        self._arrivals = _Arrivals()
        self._used: Sequence[tuple[torch.Tensor, GradientMark]] = ()
        self._looks_before: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self._all_look_before = True
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._step_is_newest = False
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take notice of the gradients of these parameters."""
        for parameter in parameters:
            if parameter in self._positions or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            position = self._positions[parameter] = len(self._parameters)
            self._parameters.append(parameter)
            self._arrivals.came.append(parameter.grad is not None)
            after = _after_gradient(weakref.ref(self), self._arrivals, position)
            trained = parameter.requires_grad
            parameter.requires_grad_()  # or torch takes no hook; it keeps those of frozen ones
            self._hooks.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]
            self._look_before_it_comes(position)
            parameter.requires_grad_(trained)

    def __del__(self) -> None:
        self.stop()

    def tell(self, told: Callable[[torch.Tensor], None]) -> None:
        """Call this with every parameter that has got a gradient, before DDP reads it."""
        self._arrivals.told = told

    def watches(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether these parameters, all of them, are watched."""
        return all(parameter in self._positions for parameter in parameters)

    def stop(self) -> None:
        """Take notice of no gradients any more."""
        while self._hooks:
            self._hooks.pop().remove()
        while self._looks_before:
            self._looks_before.popitem()[1].remove()
        self._parameters, self._positions = [], {}
        self.forget_used()

    @property
    def step_is_newest(self) -> bool:
        """Whether the last pass has stepped and no gradient has come since."""
        return self._step_is_newest

    @step_is_newest.setter
    def step_is_newest(self, newest: bool) -> None:
        self._step_is_newest = newest
        self._arrivals.first_is_open = newest or self._arrivals.first_is_open

    def take_as_used(self, parameters: Sequence[torch.Tensor], marks: Sequence[GradientMark]) -> None:
        """Take the gradients of these parameters, which have these marks, and no others, as used up."""
        self._used = list(zip(parameters, marks, strict=True))
        self._arrivals.first_is_open = True

    def take_as_new(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these, which DDP is about to write, as not used."""
        new = set(map(id, parameters))
        self._used = [pair for pair in self._used if id(pair[0]) not in new]

    def forget_used(self) -> None:
        """Take none as used up."""
        self._used = ()

    def has_come(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter has got a gradient since :meth:`forget_arrivals`, and still has it."""
        position = self._positions.get(parameter)
        return position is not None and bool(self._arrivals.came[position]) and parameter.grad is not None

    def some_have_come(self) -> bool:
        """Whether any gradient has come since :meth:`forget_arrivals`."""
        return any(self._arrivals.came)

    def forget_arrivals(self) -> None:
        """A pass has handed over all its gradients."""
        self._arrivals.came[:] = bytes(len(self._arrivals.came))

    def _after_gradient(self, position: int, parameter: torch.Tensor) -> None:
        """Look at the first gradient since a step, or one that was added to a used one."""
        first = self._arrivals.first_is_open and bool(self._parameters)
        used = position in self._arrivals.adds_to_used
        if first and position not in self._looks_before:  # too late to look before, this time
            used = _was_added_to(self._mark(parameter), parameter)
            self._look_before_it_comes(position)
        if used:
            raise DoubleBackwardError(
                "backward() adds to gradients that a step has already used: call zero_grad() after each "
                "step, and accumulate with no_sync() or pause()"
            )
        if first:
            self._arrivals.first_is_open = False
            self._step_is_newest = False
            self._look_at_others(position, parameter)

    def _look_at_others(self, position: int, parameter: torch.Tensor) -> None:
        """Look which gradients are left when the first one has come."""
        others = [(one, mark) for one, mark in self._used if one is not parameter]
        left = [one for one, _ in others if one.grad is not None]
        if others and not left and self._all_look_before:
            self._all_look_before = False
            for place in [place for place in self._looks_before if place != position]:
                self._looks_before.pop(place).remove()
                self._arrivals.adds_to_used.discard(place)  # of autograd.grad(), which has added nothing
        for one in left:
            if (place_left := self._positions.get(one)) is not None:
                self._look_before_it_comes(place_left)
        self._used = [(one, mark) for one, mark in others if _is_used_up(one, mark)]

    def _mark(self, parameter: torch.Tensor) -> GradientMark:
        return next((mark for one, mark in self._used if one is parameter), None)

    def _look_before_it_comes(self, position: int) -> None:
        if position not in self._looks_before:
            parameter = self._parameters[position]
            before = _before_gradient(weakref.ref(self), weakref.ref(parameter), position)
            self._looks_before[position] = parameter.register_hook(before)  # type: ignore[no-untyped-call]

    def _before_gradient(self, position: int, parameter: torch.Tensor) -> None:
        """Look at ``parameter.grad`` before a gradient is added; ``torch.autograd.grad`` will add none."""
        if _is_used_up(parameter, self._mark(parameter)):
            self._arrivals.adds_to_used.add(position)
            return
        self._arrivals.adds_to_used.discard(position)
        if not self._arrivals.first_is_open:
            self.take_as_new([parameter])


@dataclass
class _Arrivals:
    """What the hooks of all parameters write, by position."""

    came: bytearray = field(default_factory=bytearray)
    adds_to_used: set[int] = field(default_factory=set)
    first_is_open: bool = True
    told: Callable[[torch.Tensor], None] | None = None


def _after_gradient(
    watch: weakref.ref[GradientWatch], arrivals: _Arrivals, position: int
) -> Callable[[torch.Tensor], None]:
    """Return a hook on a parameter that keeps neither the watch nor a parameter alive."""

    def after(parameter: torch.Tensor) -> None:
        if arrivals.first_is_open or position in arrivals.adds_to_used:
            owner = watch()
            if owner is not None:
                owner._after_gradient(position, parameter)  # noqa: SLF001 - one thing with its hooks
        arrivals.came[position] = True
        if arrivals.told is not None:
            arrivals.told(parameter)

    return after


def _before_gradient(
    watch: weakref.ref[GradientWatch], parameter: weakref.ref[torch.Tensor], position: int
) -> Callable[[torch.Tensor | None], None]:
    def before(gradient: torch.Tensor | None) -> None:
        owner, alive = watch(), parameter()
        if owner is not None and alive is not None and gradient is not None:
            owner._before_gradient(position, alive)  # noqa: SLF001

    return before


def _is_used_up(parameter: torch.Tensor, mark: GradientMark) -> bool:
    """Whether ``parameter.grad`` is what a step has used, changed or not, and not zeros."""
    gradient = parameter.grad
    if gradient is None or mark is None:
        return False
    if gradient.device.type != "cpu":  # reading it would block the host: a changed one passes for zeros
        return gradient_marks([parameter]) == [mark]
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(values.count_nonzero())  # ten times as fast as any()


def _was_added_to(mark: GradientMark, parameter: torch.Tensor) -> bool:
    """Whether a parameter's gradient is one that had this mark, and something was added to it, once."""
    return mark is not None and gradient_marks([parameter]) == [(mark[0] + 1, mark[1])]
