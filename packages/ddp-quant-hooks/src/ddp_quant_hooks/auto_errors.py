"""The error of a candidate's average of one bucket, relative to the exact mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.auto_times import Arriving
from dist_utils import OrderedWorker

__all__ = ["ErrorSample"]


class ErrorSample:
    """The relative error of one bucket's average, in the L2 norm. Holds no state and no group."""

    def __init__(self) -> None:
        self._exact: torch.Tensor | None = None
        self._seen: Arriving | None = None

    def average(
        self, worker: OrderedWorker, buffer: torch.Tensor, average: Callable[[], torch.futures.Future[Any]]
    ) -> torch.futures.Future[Any]:
        """Average a bucket, and measure the error with one exact all-reduce of it in addition.

        Args:
            worker: For the all-reduce.
            buffer: The buffer of the bucket.
            average: Averages it, in place or not.

        Returns:
            A future of what ``average`` gives, when the error is known.
        """
        values = _real(buffer)
        exact = values.to(torch.promote_types(values.dtype, torch.float32), copy=True)
        exact.div_(worker.process_group.size())  # first, so that the sum stays finite
        self._exact = exact  # alive until the error is read: an accelerator may be far behind

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            dist.all_reduce(exact, group=group)
            return exact

        summed = worker.submit(job, device=buffer.device, name="auto_hook:exact_mean")
        return average().then(partial(self._compare, summed))

    def _compare(self, summed: torch.futures.Future[torch.Tensor], done: torch.futures.Future[Any]) -> Any:
        averaged = done.value()
        # No rank waits for this thread here, because all submitted the all-reduce before the average. (A
        # combined future would know no streams.)
        exact = summed.wait()
        mean = averaged[0] if isinstance(averaged, (list, tuple)) else averaged
        finite = exact.isfinite().all()
        # Squares of very small or large gradients would be zero or infinite.
        largest = exact.abs().amax().clamp_min(torch.finfo(exact.dtype).tiny)
        difference = (_real(mean).to(exact.dtype) - exact).div_(largest).norm()
        error = torch.where(difference == 0, 0.0, difference / exact.div_(largest).norm())
        self._seen = Arriving(torch.stack([error, finite.to(error.dtype)]))
        return averaged

    def read(self) -> float | None:
        """Return the error; ``None`` if there is none, or the exact mean has a value that is not finite."""
        if self._seen is None:
            return None
        error, finite = self._seen.read()
        self._exact = None
        if not finite:
            return None
        return math.inf if math.isnan(error) else error


def _real(values: torch.Tensor) -> torch.Tensor:
    return (torch.view_as_real(values) if values.is_complex() else values).reshape(-1)
