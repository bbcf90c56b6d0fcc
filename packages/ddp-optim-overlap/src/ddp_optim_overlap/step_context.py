"""Torch's usual state around ``step()``, for steps that run inside ``backward()``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from dist_utils.torch_compat import profiler_range

__all__ = ["step_context"]


@contextlib.contextmanager
def step_context(device: torch.device, name: str) -> Iterator[None]:
    """Set torch's modes as around a loop's ``step()``: no autocast, for example, even if backward() has it.

    Args:
        device: The device of the parameters.
        name: What a profiler calls the step.
    """
    with torch.no_grad(), _no_autocast(device), profiler_range(name):
        yield


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Disable autocast if it is on. It is off on the worker's thread, and costs as much as all the rest."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()
