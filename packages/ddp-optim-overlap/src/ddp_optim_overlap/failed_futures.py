"""Futures that fail, for DDP, which waits for every bucket in C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.errors import OverlapError

__all__ = ["failed_future", "raise_error"]


def failed_future(error: OverlapError) -> torch.futures.Future[torch.Tensor]:
    """Return a future that fails with this error."""
    begun: torch.futures.Future[None] = torch.futures.Future()
    result: torch.futures.Future[torch.Tensor] = begun.then(partial(raise_error, error))
    begun.set_result(None)  # only an error that is raised in a callback is one for those who wait in C++
    return result


def raise_error(error: OverlapError, _: object) -> Any:
    """Raise in a callback of a future, or in a job of a worker."""
    raise error
