"""Step all buckets together: averages are written back as they arrive, and stepped after the last one."""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import BucketGradients
from ddp_optim_overlap.errors import StepError, not_averaged, text_of
from ddp_optim_overlap.first_error import FirstError
from ddp_optim_overlap.gradient_contents import GradientContents
from ddp_optim_overlap.step_context import step_context
from ddp_optim_overlap.stepper import Stepper

__all__ = ["WholeStep"]


class WholeStep:
    """Steps everything at the end of ``backward()``, when DDP has written all averages into ``.grad``.

    Args:
        stepper: Steps the parameters.
        contents: Records the gradients that were used.
        failure: Records the first error.
    """

    def __init__(self, stepper: Stepper, contents: GradientContents, failure: FirstError) -> None:
        self._stepper, self._contents = stepper, contents
        # Gloo's thread may be the last to drop a callback, and must not destroy its own process group.
        self._failure = weakref.ref(failure)
        self._averages: list[torch.futures.Future[torch.Tensor]] = []
        self._buckets: list[tuple[BucketGradients, bool]] = []

    def begin(self) -> None:
        """Begin a backward pass."""
        self._averages, self._buckets = [], []

    def take(
        self,
        current: BackwardPass,
        index: int,
        gradients: BucketGradients,
        reduced: torch.futures.Future[Any],
        *,
        used: bool,
    ) -> torch.futures.Future[torch.Tensor]:
        """Return a future of a bucket's buffer with its average.

        Args:
            current: The backward pass.
            index: The index of the bucket.
            gradients: The bucket.
            reduced: What the communication hook has returned.
            used: Whether all of its parameters got a gradient on this rank.
        """
        done = reduced.then(partial(_written, self._failure, current, index, gradients))
        self._averages.append(done)
        self._buckets.append((gradients, used))
        return done

    def take_averages(self) -> list[torch.futures.Future[torch.Tensor]]:
        """Return the futures of this pass's buckets, once."""
        averages, self._averages = self._averages, []
        return averages

    def step(self, current: BackwardPass, device: torch.device) -> None:
        """Step, as the last action of ``backward()``.

        Raises:
            StepError: The step failed.
        """
        began = time.perf_counter()
        try:
            with step_context(device, "overlapped step"):
                self._stepper.step(())
        except BaseException as error:
            begun = self._stepper.begun
            current.partial = tuple(range(current.buckets if begun else 0))
            current.optimizers = tuple(range(begun - 1))
            raise StepError(f"the step failed: {text_of(error)}", current.report()) from error
        if self._stepper.begun:  # a scaler that has found an infinity skips the step
            current.count_step(range(current.buckets), time.perf_counter() - began, on_host=False)

    def keep_contents(self) -> None:
        """Record the gradients after a whole step: those in the buckets, unless they were changed since."""
        for gradients, used in self._buckets:
            own = [parameter.grad for parameter in gradients.parameters]
            if used and not self._stepper.changes_gradients:
                self._contents.keep(gradients, None, own)
            else:
                self._contents.keep_own(gradients.parameters)
        self._buckets = []


def _written(
    weak_failure: weakref.ref[FirstError],
    current: BackwardPass,
    index: int,
    gradients: BucketGradients,
    reduced: torch.futures.Future[Any],
) -> torch.Tensor:
    """Write the average of a bucket that is not stepped by itself to where DDP reads it."""
    try:
        gradients.write(reduced.value())
    except Exception as error:
        not_written, failure = not_averaged(index, error, current.report()), weak_failure()
        if failure is None:
            raise not_written from error
        first = failure.keep(not_written, error)
        raise first from first.__cause__
    return gradients.buffer
