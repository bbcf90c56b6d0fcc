"""What is known of one backward pass while it steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_optim_overlap.report import StepReport

__all__ = ["BackwardPass", "CancelUnlessCalled"]


@dataclass
class BackwardPass:
    """One backward pass: what it has handed over, and what was stepped."""

    number: int
    steps: bool
    buckets: int = 0
    stepped: list[int] = field(default_factory=list)
    partial: tuple[int, ...] = ()
    optimizers: tuple[int, ...] = ()
    seconds: float = 0.0
    hidden: float = 0.0
    maybe_exposed: float = 0.0
    norm: torch.Tensor | None = None
    cancelled: bool = False
    over: bool = False
    """Whether DDP has ended it, well or not."""
    only_bucket: bool = False
    """Whether there is one bucket, as before DDP has rebuilt them."""
    handed_over: list[torch.Tensor] = field(default_factory=list)
    """Parameters whose gradients go at the end of the pass."""
    stepping: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """Let no bucket's step begin any more, and wait for the one in progress: the report is final then."""
        self.cancelled = True
        with self.stepping:
            pass

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


class CancelUnlessCalled:
    """A callback for the end of a backward pass. If that fails, torch drops its callbacks uncalled.

    Args:
        current: The backward pass.
        then: Called if it fails.
    """

    def __init__(self, current: BackwardPass, then: Callable[[], None] = lambda: None) -> None:
        self._pass: BackwardPass | None = current
        self._then = then

    def __call__(self) -> None:
        """End well."""
        self._pass = None

    def __del__(self) -> None:
        if self._pass is not None:
            self._pass.cancel()  # before backward() raises
            self._then()
