"""What an overlap is doing: one state with named transitions, and the first error."""

from __future__ import annotations

import threading
from enum import Enum

from ddp_optim_overlap.errors import CommunicationError, ConfigError, OverlapError
from ddp_optim_overlap.passes.gradient_watch import GradientWatch
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker
from dist_utils.process_groups import same_error


class Phase(Enum):
    """What an overlap is doing. ``optimizer.step()``, ``wait()`` and every new pass ask."""

    IDLE = "no pass has stepped since the loop's last step()"
    RUNNING = "a backward pass hands over buckets, which are stepped"
    STEPPED = "a backward pass has stepped; the loop's step() is still to come"
    FAILED = "there was an error; it is raised again until remove()"
    REMOVED = "remove() was called: buckets are only averaged"


_TRANSITIONS = {
    "begin": ({Phase.IDLE, Phase.STEPPED}, Phase.RUNNING),
    "finish": ({Phase.RUNNING}, Phase.STEPPED),
    "settle": ({Phase.STEPPED}, Phase.IDLE),
}
"""For each event, the phases in which it may happen, and the phase that it leads to."""


class OverlapState:
    """The phase of an overlap, and its first error, which every later call raises again until ``remove()``.

    It keeps copies of errors: those that are raised get frames, which hold the caller's model. The model's
    reducer, of which the garbage collector knows nothing, holds the overlap.

    Args:
        worker: Its error counts, too: that of a job or of a peer.
        gradients: As the attribute.

    Attributes:
        gradients: Which gradients have come.
        report: What the newest pass that steps has stepped, once it has ended or failed.
    """

    def __init__(self, worker: OrderedWorker, gradients: GradientWatch) -> None:
        self.gradients = gradients
        self.report = StepReport()
        self._phase = Phase.IDLE
        self._worker: OrderedWorker | None = worker
        self._error: OverlapError | None = None
        self._error_lock = threading.Lock()  # a step may fail on the worker's thread

    @property
    def phase(self) -> Phase:
        """The phase. An error leads to FAILED from everywhere, and only ``remove()`` leads out."""
        if self._phase is not Phase.REMOVED and self._first_error() is not None:
            return Phase.FAILED
        return self._phase

    @property
    def awaits_call(self) -> bool:
        """Whether a pass has stepped and no gradient has come since: the next ``step()`` is for that pass."""
        return self.phase in (Phase.STEPPED, Phase.REMOVED) and self.gradients.none_since_step

    def begin(self) -> None:
        """A pass that steps begins, after :meth:`raise_error`."""
        self._move("begin")

    def finish(self) -> None:
        """The running pass has stepped all of its buckets; an error of a peer does not undo that."""
        self._move("finish")

    def settle(self) -> None:
        """The loop has called ``step()`` for everything that was stepped."""
        if self._phase is not Phase.REMOVED:
            self._move("settle")

    def remove(self) -> None:
        """Only average from now on. What failed before is no longer raised."""
        self._phase, self._error, self._worker = Phase.REMOVED, None, None

    def fail(self, error: OverlapError) -> OverlapError:
        """Keep an error as the first one, unless there was one before; return the first, to be raised.

        The peers hear of it without a wait for any of them: the worker's private group ends.
        """
        with self._error_lock:
            first = self._first_error()
            if first is None:
                first = self._error = _copy_of(error)
        if self._worker is not None:
            self._worker.fail(first)
        return _copy_of(first)

    def raise_error(self) -> None:
        """Raise the first error, if there was one."""
        error = self._first_error()
        if error is not None and self._phase is not Phase.REMOVED:
            raise _copy_of(error)

    def _move(self, event: str) -> None:
        allowed, after = _TRANSITIONS[event]
        if self._phase not in allowed:
            raise ConfigError(f"an overlapped step cannot {event} now: {self._phase.value}")
        self._phase = after

    def _first_error(self) -> OverlapError | None:
        error = self._error or (None if self._worker is None else self._worker.error)
        if error is not None and not isinstance(error, OverlapError):
            self._error = CommunicationError(str(error), self.report)
            self._error.__cause__ = error
            return self._error
        return error


def _copy_of(error: OverlapError) -> OverlapError:
    copied = same_error(error)
    return copied if isinstance(copied, OverlapError) else error
