"""The state of the running backward pass and of the last one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_optim_overlap.released_pass import ReleasedPass
from ddp_optim_overlap.report import StepReport
from ddp_optim_overlap.weight_reuse import WeightWatch

__all__ = ["BackwardPass", "CancelUnlessCalled", "Passes"]


@dataclass
class BackwardPass:
    """One backward pass: the buckets that it has handed over, and those that were stepped.

    Attributes:
        number: Its number among the passes that step; other passes have no number of their own.
        steps: Whether averaged buckets are stepped.
        watch: Notified of stepped weights, if set.
        released: Frees the gradients of stepped buckets, if set.
        stepping: Held while a bucket is stepped.
        runs: Whether torch is still running it.
    """

    number: int
    steps: bool
    watch: WeightWatch | None = None
    released: ReleasedPass | None = None
    buckets: int = 0
    stepped: list[int] = field(default_factory=list)
    partial: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()
    seconds: float = 0.0
    hidden: float = 0.0
    maybe_exposed: float = 0.0
    norm: torch.Tensor | None = None
    canceled: bool = False
    stepping: threading.Lock = field(default_factory=threading.Lock)
    runs: bool = False

    def cancel(self) -> None:
        """Let no further step begin, and wait for the one in progress. The report is final afterwards."""
        self.canceled = True
        with self.stepping:
            pass

    def end(self) -> None:
        """Clean up after the pass, whether it succeeded or failed."""
        if self.watch is not None:
            self.watch.end()  # otherwise nobody could write .grad
        if self.released is not None:
            with self.stepping:
                self.released.end()

    def await_bucket(self, reduced: torch.futures.Future[Any]) -> Any:
        """Wait for the average. If it has not arrived yet, the steps so far were hidden behind it."""
        if not reduced.done():
            self.hidden += self.maybe_exposed
            self.maybe_exposed = 0.0
        return reduced.wait()

    def count_step(self, buckets: Sequence[int], seconds: float, *, on_host: bool) -> None:
        """Record buckets that were stepped. Their step may have been hidden behind the next average."""
        self.stepped += buckets
        self.seconds += seconds
        if on_host:
            self.maybe_exposed += seconds

    def report(self) -> StepReport:
        """Return what was stepped so far."""
        return StepReport(
            number=self.number,
            buckets=self.buckets,
            stepped=tuple(self.stepped),
            partial=self.partial,
            optimizers=self.optimizers,
            seconds=self.seconds,
            seconds_hidden=self.hidden,
            norm=self.norm,
        )


class Passes:
    """The backward passes of an engine.

    Attributes:
        running: The newest pass, until it has stepped and succeeded.
        last: The report of the last pass that stepped and succeeded.
    """

    def __init__(self) -> None:
        self.running: BackwardPass | None = None
        self.last = StepReport()
        self._number = 0

    def begin(self, *, steps: bool) -> BackwardPass:
        """Begin a pass and return it."""
        self._number += steps
        self.running = BackwardPass(self._number, steps)
        return self.running

    def finish(self, current: BackwardPass) -> None:
        """Record a pass that has succeeded."""
        self.last = current.report()
        self.running = None

    def report(self) -> StepReport:
        """Return what the running pass has stepped so far, or else the last report."""
        return self.last if self.running is None else self.running.report()


class CancelUnlessCalled:
    """A callback for the end of a backward pass that cancels the pass if it fails.

    If a pass fails, torch drops its callbacks without calling them.

    Args:
        current: The backward pass, which starts running.
    """

    def __init__(self, current: BackwardPass) -> None:
        self._pass: BackwardPass | None = current
        current.runs = True

    def __call__(self) -> None:
        """Mark the pass as successful."""
        if self._pass is not None:
            self._pass.runs = False
        self._pass = None

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.runs = False
            self._pass.cancel()  # before backward() raises
            self._pass.end()
