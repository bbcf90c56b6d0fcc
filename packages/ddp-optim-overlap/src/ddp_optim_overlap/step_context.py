"""The state of torch in which a loop calls ``step()``, for steps that ``backward()`` makes instead."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dist_utils.torch_compat import profiler_range

__all__ = ["step_context"]


@contextlib.contextmanager
def step_context(device: torch.device, name: str) -> Iterator[None]:
    """Be where a loop calls ``step()``: not under autocast, for one, though ``backward()`` may be.

    Args:
        device: The device of the parameters.
        name: What a profiler calls the step.
    """
    with torch.no_grad(), _no_autocast(device), profiler_range(name):
        yield


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On the worker's thread there is none: it takes as long to enter as all the rest here."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
