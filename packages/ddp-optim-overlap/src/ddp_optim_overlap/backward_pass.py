"""The state of backward passes: of the one that runs, and of the last one."""

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
    """One backward pass: what it has handed over, and what was stepped.

    Attributes:
        number: Of passes that step; what else has none of its own.
        steps: Whether it steps what it averages.
        watch: Told of stepped weights, if anybody is.
        released: Takes the gradients of stepped buckets away, if anybody does.
        stepping: Held while a bucket is stepped.
        runs: Whether torch is still computing it.
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
        """Let no bucket's step begin any more, and wait for the one in progress: the report is final then."""
        self.canceled = True
        with self.stepping:
            pass

    def end(self) -> None:
        """DDP has ended it, well or not."""
        if self.watch is not None:
            self.watch.end()  # it would not let .grad be written
        if self.released is not None:
            with self.stepping:
                self.released.end()

    def await_bucket(self, reduced: torch.futures.Future[Any]) -> Any:
        """Return the average; if it is not there yet, what was stepped until now was hidden behind it."""
        if not reduced.done():
            self.hidden += self.maybe_exposed
            self.maybe_exposed = 0.0
        return reduced.wait()

    def count_step(self, buckets: Sequence[int], seconds: float, *, on_host: bool) -> None:
        """Take notice of buckets that were stepped, which may have hidden the wait for the next average."""
        self.stepped += buckets
        self.seconds += seconds
        if on_host:
            self.maybe_exposed += seconds

    def report(self) -> StepReport:
        """Return what was stepped until now."""
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
        running: The newest one, until it has stepped and ended well.
        last: What the last one has done that stepped and ended well.
    """

    def __init__(self) -> None:
        self.running: BackwardPass | None = None
        self.last = StepReport()
        self._number = 0

    def begin(self, *, steps: bool) -> BackwardPass:
        """Return the pass that begins."""
        self._number += steps
        self.running = BackwardPass(self._number, steps)
        return self.running

    def finish(self, current: BackwardPass) -> None:
        """Take notice of a pass that has ended well."""
        self.last = current.report()
        self.running = None

    def report(self) -> StepReport:
        """Return what the running pass has stepped until now, or the last one."""
        return self.last if self.running is None else self.running.report()


class CancelUnlessCalled:
    """A callback for the end of a backward pass. If that fails, torch drops its callbacks uncalled.

    Args:
        current: The backward pass, which begins to run.
    """

    def __init__(self, current: BackwardPass) -> None:
        self._pass: BackwardPass | None = current
        current.runs = True

    def __call__(self) -> None:
        """End well."""
        if self._pass is not None:
            self._pass.runs = False
        self._pass = None

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.runs = False
            self._pass.cancel()  # before backward() raises
            self._pass.end()
