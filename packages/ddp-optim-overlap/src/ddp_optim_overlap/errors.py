"""The errors of overlapped steps, and the report of one that they carry."""

from __future__ import annotations

from dataclasses import dataclass

from dist_utils import AgreementError


@dataclass(frozen=True)
class StepReport:
    """The report of what one backward pass has stepped.

    Attributes:
        number: The number of the pass, 1 for the first that stepped or was meant to step.
        buckets: How many gradient buckets were handed over.
        stepped: The indices of the buckets whose parameters were stepped, in order.
        partial: The indices of the buckets whose step began and failed; any of their parameters may have been
            stepped.
        seconds: The time that the steps took, on this rank's host.
        seconds_hidden: At least this part of them ended while a later average was still awaited. Zero
            on an accelerator, where the host does not know.
    """

    number: int = 0
    buckets: int = 0
    stepped: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    seconds: float = 0.0
    seconds_hidden: float = 0.0

    @property
    def hidden_ratio(self) -> float | None:
        """The part of ``seconds`` that was hidden; ``None`` if nothing was stepped."""
        return self.seconds_hidden / self.seconds if self.seconds else None

    def as_dict(self) -> dict[str, int | float]:
        """Return attributes and properties by name, as plain numbers; for lists of indices, their lengths.

        Values that are ``None`` are left out.
        """
        values = {
            **vars(self),
            "stepped": len(self.stepped),
            "partial": len(self.partial),
            "hidden_ratio": self.hidden_ratio,
        }
        return {name: value for name, value in values.items() if value is not None}

    def progress(self) -> str:
        """Describe which buckets were stepped."""
        if not (self.stepped or self.partial):
            return f"step {self.number}: no parameter was stepped"
        parts = []
        if self.stepped:
            parts.append(f"the parameters of bucket {_list_of(self.stepped)} were stepped")
        if self.partial:
            failed = _list_of(self.partial)
            parts.append(f"parameters of bucket {failed} may be stepped in part, because its step failed")
        return f"step {self.number}: {'; '.join(parts)}; nothing else was stepped"


def _list_of(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


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
