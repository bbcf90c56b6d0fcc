"""The record of one backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ddp_optim_overlap.errors import OverlapError
from ddp_optim_overlap.passes.weight_reuse import WeightWatch
from ddp_optim_overlap.released_gradients import ReleasedPass
from ddp_optim_overlap.report import StepReport

__all__ = ["BackwardPass", "PassKind", "PassStage"]


class PassKind(Enum):
    """What becomes of the buckets of a pass."""

    STEPS = "averaged and stepped"
    JOINED = "averaged with the ranks that step; under join(), this rank has no more data"
    PAUSED = "averaged, in handle.pause()"
    REMOVED = "averaged, because the overlap was removed"


class PassStage(Enum):
    """How far a pass has come."""

    BEGUN = "buckets are still to be handed over"
    COMPLETE = "the last bucket was handed over"
    ENDED = "it has finished, or was left before"


@dataclass
class BackwardPass:
    """One backward pass: the buckets that it has handed over, and those that were stepped.

    Attributes:
        kind: What becomes of its buckets.
        number: Its number among the passes that step.
        watch: Notified of stepped weights, if set.
        released: Frees the gradients of stepped buckets, if set.
        failure: Why nothing more of it is stepped; later buckets are averaged, as on the other ranks.
        refused: Whether later buckets are not averaged either: the ranks' collectives no longer match.
        stage: How far it has come.
        tasks: The numbers of torch's graph tasks that have handed over buckets, each with a weak reference to
            what the task keeps alive until it ends.
        stepping: Held while a bucket is stepped.
    """

    kind: PassKind
    number: int = 0
    watch: WeightWatch | None = None
    released: ReleasedPass | None = None
    failure: OverlapError | None = None
    refused: bool = False
    stage: PassStage = PassStage.BEGUN
    tasks: dict[int, Callable[[], object]] = field(default_factory=dict)
    buckets: int = 0
    stepped: list[int] = field(default_factory=list)
    partial: tuple[int, ...] = ()
    seconds: float = 0.0
    hidden: float = 0.0
    maybe_exposed: float = 0.0
    norm: torch.Tensor | None = None
    canceled: bool = False
    stepping: threading.Lock = field(default_factory=threading.Lock)

    def runs(self) -> bool:
        """Whether torch is still running one of the tasks; between nested ones it may not be."""
        return any(mark() is not None for mark in list(self.tasks.values()))

    def cancel(self) -> None:
        """Let no further step begin, and wait for the one in progress. The report is final afterwards."""
        self.canceled = True
        with self.stepping:
            pass

    def end(self) -> None:
        """Clean up after the pass, whether it succeeded or failed."""
        self.stage = PassStage.ENDED
        if self.watch is not None:
            self.watch.end()  # otherwise nobody could write .grad
        if self.released is not None:
            with self.stepping:
                self.released.end()

    def await_average(self, averaged: torch.futures.Future[Any]) -> Any:
        """Wait for an average. If it has not arrived yet, the steps so far were hidden behind it."""
        if not averaged.done():
            self.hidden += self.maybe_exposed
            self.maybe_exposed = 0.0
        return averaged.wait()

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
            seconds=self.seconds,
            seconds_hidden=self.hidden,
            norm=self.norm,
        )
