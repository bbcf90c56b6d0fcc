"""What the worker does beside stepping, and the futures and errors of buckets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_optim_overlap.backward_pass import BackwardPass
from ddp_optim_overlap.errors import CommunicationError, OverlapError
from dist_utils.torch_compat import is_accelerator, profiler_range, start_all_reduce

__all__ = [
    "as_outside_of_backward",
    "failed",
    "meet_peers",
    "not_averaged",
    "raise_error",
    "text_of",
    "used_anywhere",
    "wait_for_all",
]


@contextlib.contextmanager
def as_outside_of_backward(device: torch.device, name: str) -> Iterator[None]:
    """Be where a loop calls ``step()``: not under autocast, for one, though ``backward()`` may be.

    Args:
        device: Of the parameters.
        name: What a profiler calls it.
    """
    with torch.no_grad(), _no_autocast(device), profiler_range(name):
        yield


def _no_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On the worker's thread there is none: it takes as long to enter as all the rest here."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def not_averaged(index: int, error: Exception, current: BackwardPass) -> CommunicationError:
    """Return the error of a bucket whose average failed."""
    return CommunicationError(f"bucket {index} was not averaged: {text_of(error)}", current.report())


def wait_for_all(averages: list[torch.futures.Future[torch.Tensor]], _: dist.ProcessGroup) -> None:
    """Be a job that ends when these averages are there."""
    for average in averages:
        average.wait()


def raise_error(error: OverlapError, _: object) -> Any:
    """Raise in a job or a callback."""
    raise error


def failed(error: OverlapError) -> torch.futures.Future[torch.Tensor]:
    """Return a future that fails."""
    begun: torch.futures.Future[None] = torch.futures.Future()
    result: torch.futures.Future[torch.Tensor] = begun.then(partial(raise_error, error))
    begun.set_result(None)  # only an error that is raised in a callback is one for those who wait in C++
    return result


def meet_peers(current: BackwardPass, group: dist.ProcessGroup) -> None:
    """Return when every rank has stepped. A rank whose step failed has ended this group instead."""
    if group.size() == 1:
        return
    try:
        start_all_reduce(torch.zeros(1, dtype=torch.float32), group).wait()
    except Exception as error:
        raise CommunicationError(
            f"another rank failed in this step: {text_of(error)}", current.report()
        ) from error


def used_anywhere(used: list[bool], group: dist.ProcessGroup, device: torch.device) -> list[bool]:
    """Return which parameters of a bucket got a gradient on some rank."""
    pin = is_accelerator(device)  # a copy from other memory would wait for the device
    anywhere = torch.tensor(used, dtype=torch.int32, pin_memory=pin).to(device, non_blocking=pin)
    if group.size() > 1:
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
    # Reading it waits for the device: only where the answer is open.
    return used if all(used) else [bool(value) for value in anywhere.tolist()]


def text_of(error: BaseException) -> str:
    """Return an error's class and text."""
    return f"{type(error).__name__}: {error}"
