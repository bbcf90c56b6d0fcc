"""Requests to the store by which the job's ranks have found each other: none is waited for without end."""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import torch.distributed as dist

from dist_utils import torch_compat

T = TypeVar("T")

_spare: weakref.WeakKeyDictionary[Any, queue.SimpleQueue[_Connection]] = weakref.WeakKeyDictionary()
"""Connections that nobody uses, by the store that they lead to."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_spare.clear)  # they are the parent's

_unanswered: weakref.WeakSet[futures.Future[Any]] = weakref.WeakSet()
"""Of requests for which nobody waits any longer; the threads that still wait keep them."""


def store_answers() -> bool:
    """Return whether no request has been given up that is still without an answer."""
    return not _unanswered


@atexit.register
def _await_answers() -> None:
    """Wait a moment for answers that are on their way: C++ ends the process if they come still later."""
    end = time.monotonic() + 1.0
    while _unanswered and time.monotonic() < end:
        time.sleep(0.01)


def ask_store(
    requests: Callable[[Any], T], seconds: float, undo: Callable[[T], object] = lambda _: None
) -> T:
    """Run requests to the default group's store, and return their result; do not wait for longer than this.

    If the store's process is stopped, or the link to it is cut, torch waits for an answer until TCP gives up,
    and no signal ends that. So requests run on the daemon thread of a connection, which then is given up.

    Args:
        requests: Called on that thread with a connection that no other thread uses meanwhile: a request that
            waits in the store blocks all others on its connection, and ranks may wait for each other. torch
            2.6 has one connection only.
        seconds: How long to wait.
        undo: Called on the thread with a result that comes when nobody waits for it any longer.

    Raises:
        torch.distributed.DistError: The store is gone, or has not answered in time.
        Exception: What ``requests`` raises.
    """
    spare = _spare.setdefault(torch_compat.default_store(), queue.SimpleQueue())
    try:
        connection = spare.get_nowait()
    except queue.Empty:
        connection = _Connection()
    asked: futures.Future[T] = futures.Future()
    try:
        connection.jobs.put((requests, asked, undo))
        result = asked.result(min(seconds, threading.TIMEOUT_MAX))
    except futures.TimeoutError:
        _unanswered.add(asked)
        text = f"the process group's store has not answered within {seconds:g} s"
        raise dist.DistError(text) from None
    finally:
        asked.cancel()  # after a timeout or an interrupt; else it has ended
        del asked  # an error that it holds would refer to it by this frame
    spare.put(connection)  # not after an error: an answer may still be on its way
    return result


class _Connection:
    """A connection to the store, and the thread that makes its requests; both end with this object."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self.jobs.put, None).atexit = False
        threading.Thread(target=_serve, args=(self.jobs,), name="store", daemon=True).start()


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    connection = None
    while (job := jobs.get()) is not None:
        connection = _answer(connection, *job)
        del job


def _answer(
    connection: Any, requests: Callable[[Any], T], asked: futures.Future[T], undo: Callable[[T], object]
) -> Any:
    """Give what was asked for; return the connection for the next requests."""
    try:
        connection = connection or _connect()
        result = requests(connection)
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        with contextlib.suppress(futures.InvalidStateError):
            asked.set_exception(error)
        del asked  # likewise
        return None
    try:
        asked.set_result(result)
    except futures.InvalidStateError:
        undo(result)
    return connection if hasattr(connection, "clone") else None  # else it is the default group's own


def _connect() -> Any:
    store: Any = torch_compat.default_store()
    return store.clone() if hasattr(store, "clone") else store
