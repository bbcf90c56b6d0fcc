"""The first error of an overlap; every later call raises it again."""

from __future__ import annotations

from collections.abc import Callable

from ddp_optim_overlap.errors import CommunicationError, OverlapError
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker

__all__ = ["FirstError"]


class FirstError:
    """Keeps an error until the overlap is removed, or a refusal until the next backward pass.

    Args:
        worker: Its error counts, too: that of a job or of a peer.
        report: Returns what was stepped so far, for an error of the worker.
    """

    def __init__(self, worker: OrderedWorker, report: Callable[[], StepReport]) -> None:
        self._worker: OrderedWorker | None = worker
        self._report = report
        self._error: OverlapError | None = None
        self.refusal: OverlapError | None = None
        """Why the rest of the running pass is refused: the ranks' collectives would no longer match."""

    def keep(self, error: OverlapError) -> OverlapError:
        """Return the first error: this one, unless there was one before."""
        self._error = self._first() or error
        return self._error

    def raise_if_any(self) -> None:
        """Raise the first error, or else the refusal, if there is one."""
        error = self._first() or self.refusal
        if error is not None:
            raise error

    def forget_worker(self) -> None:
        """Ignore errors of the worker from now on."""
        self._worker = None

    def _first(self) -> OverlapError | None:
        error = self._error or (None if self._worker is None else self._worker.error)
        if error is not None and not isinstance(error, OverlapError):
            self._error = CommunicationError(str(error), self._report())
            self._error.__cause__ = error
            return self._error
        return error
