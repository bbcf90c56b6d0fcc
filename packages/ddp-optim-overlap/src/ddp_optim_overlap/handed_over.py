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
    """One bucket of a backward pass, as DDP has handed it over.

    Attributes:
        index: Its number in DDP.
        gradients: Where its average will be.
        used: Which of its parameters got a gradient, on this rank and then on any; ``None`` if all have.
        reduced: What the communication hook has returned.
        done: What DDP waits for. Its value is what DDP takes for the average.
        taken: Whether the worker has it.
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
        """End well, unless it has ended."""
        with self._ending:
            if not self._ended:
                self._ended = True
                self.done.set_result(average)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        with self._ending:
            if not self._ended:
                self._ended = True
                # The future holds its error, and DDP the future. No frames that hold the model may be noted
                # in it, as in the first error that is raised again: a cycle through C++ is never garbage.
                held = RuntimeError(str(error) if type(error) is RuntimeError else text_of(error))
                if isinstance(error, OverlapError):
                    held = type(error)(*error.args)
                    held.report = error.report
                self.done.set_exception(held)  # type: ignore[arg-type] # torch's annotation
                held.__traceback__ = None
                self.done = torch.futures.Future()

    @property
    def nbytes(self) -> int:
        """The size of its gradients; sparse ones, whose size changes, count as enough for a step."""
        buffer = self.gradients.buffer
        return sys.maxsize if buffer.is_sparse else buffer.nbytes
