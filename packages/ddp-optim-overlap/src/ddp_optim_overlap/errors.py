"""The errors of overlapped steps."""

from __future__ import annotations

from ddp_optim_overlap.report import StepReport
from dist_utils import AgreementError


class OverlapError(RuntimeError):
    """Base class of all errors of this package.

    Attributes:
        report: The buckets that were stepped before the error; ``None`` if none were to be stepped.
    """

    def __init__(self, message: str, report: StepReport | None = None) -> None:
        super().__init__(message if report is None else f"{message} ({report.progress()})")
        self.report = report

    def with_report(self, report: StepReport) -> OverlapError:
        """Return this error with a report, unless it has one."""
        if self.report is not None:
            return self
        complete = type(self)(str(self), report)
        complete.__cause__ = self.__cause__
        return complete


class ConfigError(OverlapError):
    """The options, the model or the training loop would lead to wrong steps."""


class UnsupportedOptimizerError(OverlapError):
    """The optimizer cannot step a part of its parameters at a time, or needs a closure."""


class UnsupportedGradientError(OverlapError):
    """The optimizer cannot step with the gradients that the model gives it."""


class CommunicationError(OverlapError):
    """Gradients were not averaged: the communication hook failed, or a peer did."""


class StepError(OverlapError):
    """The optimizer's step failed, or did not finish."""


class DoubleBackwardError(OverlapError):
    """A backward pass adds to gradients that a step has already used."""


def kind_of_failure(error: Exception) -> type[ConfigError | CommunicationError]:
    """Return the type for an error of the communication: the program is wrong if all came and differ."""
    differ = isinstance(error, AgreementError) and not error.missing
    return ConfigError if differ else CommunicationError
