"""The first thing that went wrong in an overlap, which everything after it raises too."""

from __future__ import annotations

from ddp_optim_overlap.errors import CommunicationError, OverlapError
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker

__all__ = ["FirstError"]


class FirstError:
    """Keeps an error until the overlap is removed, or a refusal until the next backward pass.

    Args:
        worker: Its error counts too: that of a job, or of a peer.
    """

    def __init__(self, worker: OrderedWorker) -> None:
        self._worker: OrderedWorker | None = worker
        self._error: OverlapError | None = None
        self.refusal: OverlapError | None = None
        """Why the rest of the running pass is refused: the ranks' collectives would not match any more."""

    def keep(self, error: OverlapError, report: StepReport) -> OverlapError:
        """Return the first error: this one, unless there was one before.

        Args:
            error: What went wrong.
            report: What was stepped until now, for an error of the worker that has none.
        """
        self._error = self._first(report) or error
        return self._error

    def raise_if_any(self, report: StepReport) -> None:
        """Raise the first error, or else the refusal, if there is one; ``report`` as in :meth:`keep`."""
        error = self._first(report) or self.refusal
        if error is not None:
            raise error

    def forget_worker(self) -> None:
        """From now on the worker's error is nobody's concern."""
        self._worker = None

    def _first(self, report: StepReport) -> OverlapError | None:
        error = self._error or (None if self._worker is None else self._worker.error)
        if error is not None and not isinstance(error, OverlapError):
            self._error = CommunicationError(str(error), report)
            self._error.__cause__ = error
            return self._error
        return error
