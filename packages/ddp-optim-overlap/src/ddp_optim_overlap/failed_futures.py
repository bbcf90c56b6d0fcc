"""Failed futures for DDP, which waits for every bucket in C++."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ddp_optim_overlap.errors import OverlapError
from dist_utils.process_groups import same_error

__all__ = ["failed_future", "raise_error"]


def failed_future(error: OverlapError) -> torch.futures.Future[torch.Tensor]:
    """Return a future that fails with this error."""
    begun: torch.futures.Future[None] = torch.futures.Future()
    result: torch.futures.Future[torch.Tensor] = begun.then(partial(raise_error, error))
    begun.set_result(None)  # C++ waiters see only errors that are raised in a callback
    return result


def raise_error(error: OverlapError, _: object) -> Any:
    """Raise the error, as a future's callback or a worker's job."""
    raise same_error(error)  # a copy: raising adds frames, which a kept error must not hold
