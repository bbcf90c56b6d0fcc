"""One bucket between its communication hook and the step of its parameters."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from ddp_optim_overlap.bucket_gradients import BucketGradients
from ddp_optim_overlap.errors import OverlapError, text_of

__all__ = ["HandedOver"]


@dataclass(eq=False)
class HandedOver:
    """One bucket of a backward pass, as DDP handed it over.

    Attributes:
        index: Its number in DDP.
        gradients: The views that will hold its averaged gradients.
        used: Which of its parameters got a gradient, first on this rank, then on any rank; ``None`` if all.
        reduced: The future that the communication hook returned.
        done: The future that DDP waits for. DDP takes its value for the average.
        taken: Whether the worker has taken it.
    """

    index: int
    gradients: BucketGradients
    used: list[bool] | None
    reduced: torch.futures.Future[Any]
    done: torch.futures.Future[torch.Tensor] = field(default_factory=torch.futures.Future)
    taken: bool = False
    _ending: threading.Lock = field(default_factory=threading.Lock)
    _ended: bool = False

    def complete(self, average: torch.Tensor) -> None:
        """Complete the future, unless it is complete."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self.done.set_result(average)

    def fail(self, error: BaseException) -> None:
        """Complete the future with an error, unless it is complete."""
        with self._ending:
            if not self._ended:
                self._ended = True
                # The future holds its error, and DDP the future. So the error must not hold frames with the
                # model, as a raised error does: a cycle through C++ is never collected.
                held = RuntimeError(str(error) if type(error) is RuntimeError else text_of(error))
                if isinstance(error, OverlapError):
                    held = type(error)(*error.args)
                    held.report = error.report
                self.done.set_exception(held)  # type: ignore[arg-type] # torch's annotation
                held.__traceback__ = None
                self.done = torch.futures.Future()

    @property
    def nbytes(self) -> int:
        """The size of its gradients; sparse ones vary in size and count as enough for a step."""
        buffer = self.gradients.buffer
        return sys.maxsize if buffer.is_sparse else buffer.nbytes
