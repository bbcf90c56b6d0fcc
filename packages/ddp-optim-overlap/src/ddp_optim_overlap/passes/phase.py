"""What an overlap is doing, and its first error."""

from __future__ import annotations

from enum import Enum

from ddp_optim_overlap.errors import OverlapError, kind_of_failure
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker


class Phase(Enum):
    """What an overlap is doing. ``optimizer.step()``, ``wait()`` and every new pass ask."""

    IDLE = "no backward pass steps"
    RUNNING = "a backward pass hands over buckets, which are stepped"
    FAILED = "there was an error; it is raised again until remove()"
    REMOVED = "remove() was called: buckets are only averaged"


class OverlapState:
    """The phase of an overlap, and its first error, which every later call raises again until ``remove()``.

    The worker keeps that error, as copies: those that are raised get frames, which hold the caller's model.
    The model's reducer, of which the garbage collector knows nothing, holds the overlap.

    Args:
        worker: Keeps the first error, of a job, a peer or the loop.

    Attributes:
        report: What the newest pass that steps has stepped, once it has ended or failed.
    """

    def __init__(self, worker: OrderedWorker) -> None:
        self.report = StepReport()
        self._phase = Phase.IDLE
        self._worker: OrderedWorker | None = worker

    @property
    def phase(self) -> Phase:
        """The phase. An error leads to FAILED from everywhere, and only ``remove()`` leads out."""
        return self._phase if self.error is None else Phase.FAILED

    @property
    def error(self) -> OverlapError | None:
        """A copy of the first error, unless the overlap was removed; what failed before no longer counts."""
        error = None if self._worker is None else self._worker.error
        if error is None or isinstance(error, OverlapError):
            return error
        failure = kind_of_failure(error)(str(error), self.report)
        failure.__cause__ = error
        return failure

    def begin(self) -> None:
        """A pass that steps begins, after :meth:`raise_error`."""
        self._phase = Phase.RUNNING

    def finish(self) -> None:
        """The running pass has stepped all of its buckets; an error of a peer does not undo that."""
        self._phase = Phase.IDLE

    def remove(self) -> None:
        """Only average from now on."""
        self._phase, self._worker = Phase.REMOVED, None

    def fail(self, error: OverlapError) -> OverlapError:
        """Keep an error as the first one, unless there was one before; return the first, to be raised.

        The peers hear of it without a wait for any of them: the worker's private group ends. After
        :meth:`remove` nothing is kept.
        """
        if self._worker is not None:
            self._worker.fail(error)
        return self.error or error

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        error = self.error
        if error is not None:
            raise error
