"""The communication hook that averages the buckets of an overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.bucket_gradients import average_of
from ddp_optim_overlap.errors import CommunicationError, text_of
from ddp_optim_overlap.first_error import FirstError
from dist_utils.torch_compat import GradBucket

__all__ = ["CalledHook"]


class CalledHook:
    """Calls a communication hook, and records its error as the first one of an overlap.

    Args:
        hook: Any hook.
        state: Its first argument.
        failure: Records the first error.
    """

    def __init__(
        self,
        hook: Callable[[Any, GradBucket], torch.futures.Future[Any]],
        state: object,
        failure: FirstError,
    ) -> None:
        self._hook, self._state, self._failure = hook, state, failure

    @property
    def name(self) -> str:
        """The hook's name."""
        name: str = getattr(self._hook, "__qualname__", type(self._hook).__qualname__)
        return name

    def only_average(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the future that DDP waits for if nothing is stepped."""
        return self._hook(self._state, bucket).then(partial(average_of, bucket.buffer()))

    def start(self, bucket: GradBucket, current: BackwardPass) -> torch.futures.Future[Any]:
        """Return a future of the average of a bucket that is to be stepped.

        Raises:
            CommunicationError: The hook has failed, or has not returned a future. The pass steps no further.
        """
        try:
            reduced = self._hook(self._state, bucket)
            if not callable(getattr(reduced, "then", None)):
                raise TypeError(f"it must return a future, got {type(reduced).__name__}")  # noqa: TRY301
            if reduced.done():
                reduced.value()  # raises if it has failed: a rank that did not come is not waited for again
        except Exception as error:  # noqa: BLE001 - the cause of what is raised
            current.cancel()
            text = f"the communication hook failed for bucket {bucket.index()}: {text_of(error)}"
            first = self._failure.keep(CommunicationError(text, current.report()), error)
            raise first from first.__cause__
        return reduced
