"""Errors of a collective that was started, with the name of the function that the user called."""

from __future__ import annotations

import torch.distributed as dist

from dist_autograd_collectives.calls import Call

__all__ = ["CollectiveError", "backend_config", "named"]


class CollectiveError(RuntimeError):
    """A collective failed; in backward mostly because other ranks never reached it."""


class named:  # noqa: N801 - a context manager; contextlib's takes longer than the code that it surrounds
    """Name the collective in errors of its backward."""

    __slots__ = ("_call",)

    def __init__(self, call: Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or not isinstance(error, RuntimeError):
            return
        start, call = "the backward of ", self._call
        if isinstance(error, CollectiveError) and str(error).startswith(start):  # from a nested backward
            return
        raise CollectiveError(
            f"{start}{call.title} failed on rank {call.who.rank} of {call.who.size} in its group: {error} - "
            "If other ranks did not come to it: does every rank use its result (see connect), and does every "
            "rank's tensor need a gradient (see anchor=True)?"
        ) from error


def backend_config(call: Call) -> str:
    """Return the backends of a call's group, for example ``"cpu:gloo,cuda:nccl"``."""
    try:
        return dist.get_backend_config(call.who.group)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise CollectiveError(
            f"{call.title} cannot communicate on rank {call.who.rank} of {call.who.size} in its group, which "
            "was destroyed (destroy_process_group): run backward before that"
        ) from error
