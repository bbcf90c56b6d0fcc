"""The first error of an overlap; every later call raises it again."""

from __future__ import annotations

from collections.abc import Callable

from ddp_optim_overlap.errors import CommunicationError, OverlapError
from ddp_optim_overlap.report import StepReport
from dist_utils import OrderedWorker
from dist_utils.process_groups import same_error

__all__ = ["FirstError"]


class FirstError:
    """Keeps an error until the overlap is removed, or a refusal until the next backward pass.

    It keeps copies: those that are raised get frames, which hold the caller's model. The model's reducer, of
    which the garbage collector knows nothing, holds the overlap.

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

    def keep(self, error: OverlapError, cause: BaseException | None = None) -> OverlapError:
        """Return the first error, to be raised: this one, unless there was one before."""
        first = self._first()
        if first is None:
            if cause is not None:
                error.__cause__ = cause
            first = self._error = _copied(error)
        return _copied(first)

    def refuse(self, error: OverlapError) -> OverlapError:
        """Keep this as the refusal, and return what is kept."""
        self.refusal = _copied(error)
        return self.refusal

    def raise_if_any(self) -> None:
        """Raise the first error, or else the refusal, if there is one."""
        error = self._first() or self.refusal
        if error is not None:
            raise _copied(error)

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


def _copied(error: OverlapError) -> OverlapError:
    copied = same_error(error)
    return copied if isinstance(copied, OverlapError) else error
