"""Ranks that end when the process that started them ends, however it does."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.platform == "linux":
    import fcntl

__all__ = ["end_with_caller", "let_ranks_end_with_this_process"]

_kept_open: set[int] = set()


@contextlib.contextmanager
def let_ranks_end_with_this_process(pipe: Path) -> Iterator[None]:
    """Keep a new named pipe open for writing; the system closes it if this process is killed."""
    descriptor = None
    if sys.platform == "linux":
        try:
            os.mkfifo(pipe)
            descriptor = os.open(pipe, os.O_RDWR)  # for writing only it would wait for a reader
            _kept_open.add(descriptor)
        except OSError:  # no pipes on this file system: ranks then do not end by themselves
            pipe.unlink(missing_ok=True)
    try:
        yield
    finally:
        if descriptor in _kept_open:
            _kept_open.remove(descriptor)
            os.close(descriptor)


def _close_in_child() -> None:
    """Close the pipes in a forked process, which may outlive this one."""
    while _kept_open:
        os.close(_kept_open.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def end_with_caller(pipe: Path) -> None:
    """Have the system kill this process when nobody has the pipe open for writing anymore.

    It needs no thread, so it also ends a process that hangs with the GIL, or that is stopped. Does nothing
    except on Linux: ``F_SETSIG``, which chooses the signal, exists only there.
    """
    if sys.platform != "linux" or not pipe.exists():
        return
    # Each process opens the pipe by its name: signal and owner belong to the open file, which processes that
    # inherit it would share. It is never closed.
    descriptor = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_NONBLOCK | os.O_ASYNC)
    try:
        at_end = os.read(descriptor, 1) == b""
    except BlockingIOError:  # nothing is ever written
        at_end = False
    if at_end:  # the caller ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)
