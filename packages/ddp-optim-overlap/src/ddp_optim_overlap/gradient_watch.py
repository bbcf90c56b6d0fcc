"""Track which parameters get gradients, and which gradients a step has used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ddp_optim_overlap.errors import DoubleBackwardError
from ddp_optim_overlap.tensor_versions import gradient_marks

__all__ = ["GradientWatch"]

GradientMark = tuple[int, int] | None


class GradientWatch:
    """Notices every gradient of some parameters, and refuses one that is added to a gradient already used.

    No gradients are kept, so that setting them to ``None`` frees them: only the address of each, and its
    version, which every write in place raises.

    The hooks run for every parameter in every pass, while nothing else runs: they only set flags, unless a
    gradient is added to another one.

    Args:
        parameters: Parameters to watch from the beginning.
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        self._positions: dict[torch.Tensor, int] = {}
        self._arrivals = _Arrivals()
        self._used: tuple[Sequence[torch.Tensor], Sequence[GradientMark]] = ((), ())
        self._marks: dict[torch.Tensor, GradientMark] | None = None
        self._zeroed: bool | None = None  # all used gradients on accelerators; None: not known
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.watch(parameters)

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch the gradients of these parameters, too."""
        for parameter in parameters:
            if parameter in self._positions or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            position = self._positions[parameter] = len(self._positions)
            self._arrivals.came.append(parameter.grad is not None)
            self._arrivals.came_since_step.append(True)
            before = _before_hook(weakref.ref(self), weakref.ref(parameter), self._arrivals, position)
            after = _after_hook(weakref.ref(self), self._arrivals, position)
            trained = parameter.requires_grad
            parameter.requires_grad_()  # torch takes no hook otherwise, but keeps the hooks of frozen ones
            self._hooks += [
                parameter.register_hook(before),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(after),  # type: ignore[no-untyped-call]
            ]
            parameter.requires_grad_(trained)

    def __del__(self) -> None:
        self.stop()

    def tell(self, told: Callable[[torch.Tensor], None]) -> None:
        """Call ``told`` with every parameter that got a gradient, before DDP reads the gradient."""
        self._arrivals.told = told

    def watches(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of these parameters are watched."""
        return all(parameter in self._positions for parameter in parameters)

    def stop(self) -> None:
        """Stop watching."""
        while self._hooks:
            self._hooks.pop().remove()
        self._positions, self._arrivals = {}, _Arrivals()
        self.forget_used()

    @property
    def step_is_newest(self) -> bool:
        """Whether the last pass stepped, and neither a gradient nor a call of ``step()`` came since."""
        return self._arrivals.step_is_newest

    @step_is_newest.setter
    def step_is_newest(self, newest: bool) -> None:
        self._arrivals.step_is_newest = newest
        self._arrivals.none_since_pass = self._arrivals.none_since_pass or newest

    @property
    def none_since_pass(self) -> bool:
        """Whether no gradient has come since a pass that stepped."""
        return self._arrivals.none_since_pass

    def take_as_used(self, parameters: Sequence[torch.Tensor], marks: Sequence[GradientMark]) -> None:
        """Count the gradients of these parameters, with these marks, and no others, as used."""
        self._used, self._marks, self._zeroed = (parameters, marks), None, None
        self._arrivals.came_since_step[:] = bytes(len(self._positions))

    def take_as_new(self, parameters: Iterable[torch.Tensor]) -> None:
        """Count the gradients of these parameters, which DDP is about to write, as not used."""
        for parameter in parameters:
            if (position := self._positions.get(parameter)) is not None:
                self._arrivals.came_since_step[position] = True

    def forget_used(self) -> None:
        """Count no gradient as used."""
        self._used, self._marks, self._zeroed = ((), ()), None, None

    def has_come(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter got a gradient since :meth:`forget_arrivals`, and still has it."""
        position = self._positions.get(parameter)
        return position is not None and bool(self._arrivals.came[position]) and parameter.grad is not None

    def forget_arrivals(self) -> None:
        """Reset the flags of :meth:`has_come`: a pass has handed over all its gradients."""
        self._arrivals.came[:] = bytes(len(self._arrivals.came))

    def _is_used_up(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter.grad`` was used by a step, was changed or not since, and is not zero."""
        if self._marks is None:
            self._marks = dict(zip(*self._used, strict=True))
        mark, gradient = self._marks.get(parameter), parameter.grad
        if mark is None or gradient is None:
            return False
        if gradient.device.type != "cpu":  # reading it makes the host wait, so a written one counts as zeros
            if gradient_marks([parameter]) != [mark]:
                return False
            # zero_grad() of an optimizer with foreach or fused raises no versions here.
            if self._zeroed is None:
                self._zeroed = self._are_zero()
            if self._zeroed:
                return False
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        return bool(values.count_nonzero())  # ten times as fast as any()

    def _are_zero(self) -> bool:
        """Whether all used gradients on accelerators that look unwritten are zeros.

        The host waits once instead of once per parameter, in a loop that sets gradients to zero.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return True  # nothing can be read, so they count as zeros
        assert self._marks is not None
        unwritten = [
            gradient
            for parameter, mark in self._marks.items()
            if (gradient := parameter.grad) is not None
            and not (gradient.is_cpu or gradient.is_sparse)
            and gradient_marks([parameter]) == [mark]
        ]
        norm = torch.nn.utils.get_total_norm(unwritten, norm_type=torch.inf)
        return bool(unwritten) and not norm


@dataclass
class _Arrivals:
    """What the hooks of all parameters write: flags by position, and flags for all of them."""

    came: bytearray = field(default_factory=bytearray)
    came_since_step: bytearray = field(default_factory=bytearray)
    adds_to_used: set[int] = field(default_factory=set)
    step_is_newest: bool = False
    none_since_pass: bool = False
    told: Callable[[torch.Tensor], None] | None = None


def _before_hook(
    watch: weakref.ref[GradientWatch],
    weak_parameter: weakref.ref[torch.Tensor],
    arrivals: _Arrivals,
    position: int,
) -> Callable[[torch.Tensor | None], None]:
    """Return a hook that looks at ``.grad`` before a gradient is added, and keeps nothing alive.

    It also runs in ``torch.autograd.grad``, which adds nothing: only the other hook acts on its finding.
    """

    def before(gradient: torch.Tensor | None) -> None:
        if arrivals.adds_to_used:
            arrivals.adds_to_used.discard(position)
        if arrivals.came_since_step[position] or gradient is None:
            return
        parameter = weak_parameter()
        if parameter is None or parameter.grad is None:
            return
        owner = watch()
        if owner is not None and owner._is_used_up(parameter):  # noqa: SLF001 - its own hook
            arrivals.adds_to_used.add(position)

    return before


def _after_hook(
    watch: weakref.ref[GradientWatch], arrivals: _Arrivals, position: int
) -> Callable[[torch.Tensor], None]:
    """Return a hook that records that a gradient was added."""

    def after(parameter: torch.Tensor) -> None:
        if position in arrivals.adds_to_used and watch() is not None:
            raise DoubleBackwardError(
                "backward() adds to gradients that a step has already used: call zero_grad() after each "
                "step, and accumulate with no_sync() or pause()"
            )
        arrivals.step_is_newest = arrivals.none_since_pass = False
        arrivals.came[position] = arrivals.came_since_step[position] = True
        if arrivals.told is not None:
            arrivals.told(parameter)

    return after
