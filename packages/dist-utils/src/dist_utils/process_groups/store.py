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
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from dist_utils import torch_compat

T = TypeVar("T")

_spare: weakref.WeakKeyDictionary[Any, queue.SimpleQueue[_Connection]] = weakref.WeakKeyDictionary()
"""Connections that nobody uses, by the store that they lead to."""
_asked: set[_Asked[Any]] = set()
"""What the threads of connections ask for at the moment."""
_ending = threading.Event()
"""Set when this process ends."""
if hasattr(os, "register_at_fork"):  # the parent has the threads
    os.register_at_fork(after_in_child=_spare.clear)
    os.register_at_fork(after_in_child=_asked.clear)


def store_answers() -> bool:
    """Return whether no request has been given up that is still without an answer."""
    return not any(one.caller.gave_up for one in tuple(_asked))


@atexit.register
def _end_requests() -> None:
    """Wait a moment until no thread is in the store: C++ ends the process if one comes back still later."""
    _ending.set()
    for one in tuple(_asked):
        one.caller.give_up("its process ends")
    end = time.monotonic() + 1.0
    while _asked and time.monotonic() < end:
        time.sleep(0.01)


class Caller:
    """Who waits for the result of requests, as their thread sees it.

    Attributes:
        gave_up: Why nobody waits any longer; empty if somebody does. Requests that wait for other ranks end
            then, and do nothing from which these would conclude that this rank goes on.
        seconds: How long the caller waits, from the last call of :meth:`wait_for` on.
        until: When that is over.
    """

    seconds: float
    until: float

    def __init__(self) -> None:
        self.gave_up = ""
        self._gone = threading.Event()

    def wait_for(self, seconds: float) -> None:
        """Let the caller wait so long from now on."""
        self.seconds, self.until = seconds, time.monotonic() + seconds

    def give_up(self, why: str) -> None:
        """Say, once, that nobody waits any longer."""
        self.gave_up = self.gave_up or why
        self._gone.set()

    def sleep(self, seconds: float) -> None:
        """Let the requests' thread sleep, but not after the caller has given up."""
        self._gone.wait(seconds)


class _Asked(Generic[T]):
    """Requests to the store, and the future of their result."""

    def __init__(self, requests: Callable[[Any], T], undo: Callable[[T], object], caller: Caller) -> None:
        self.requests, self.undo, self.caller = requests, undo, caller
        self.result: futures.Future[T] = futures.Future()


def ask_store(
    requests: Callable[[Any], T],
    seconds: float,
    undo: Callable[[T], object] = lambda _: None,
    caller: Caller | None = None,
) -> T:
    """Run requests to the default group's store, and return their result; do not wait for longer than this.

    If the store's process is stopped, or the link to it is cut, torch waits for an answer until TCP gives up,
    and no signal ends that. So requests run on the daemon thread of a connection, which then is given up.

    Args:
        requests: Called on that thread with a connection that no other thread uses meanwhile: a request that
            waits in the store blocks all others on its connection, and ranks may wait for each other. torch
            2.6 has one connection only.
        seconds: How long to wait, if the requests do not say otherwise by the caller's ``wait_for``.
        undo: Called on the thread with a result that comes when nobody waits for it any longer.
        caller: Told when nobody waits any longer: after ``seconds``, an interrupt, or at the process's end.
            Who gives one has requests that end soon after that: an interrupt waits for them.

    Raises:
        torch.distributed.DistError: The store is gone, or has not answered in time.
        Exception: What ``requests`` raises.
    """
    spare = _spare.setdefault(torch_compat.default_store(), queue.SimpleQueue())
    try:
        connection = spare.get_nowait()
    except queue.Empty:
        connection = _Connection()
    asked = _Asked(requests, undo, caller or Caller())
    try:
        asked.caller.wait_for(seconds)
        connection.jobs.put(asked)
        result = _result_of(asked)
    except BaseException as error:
        if not asked.result.done():  # nobody waits any longer
            late = isinstance(error, dist.DistError)
            # Not the error itself: its frames refer to what was asked.
            asked.caller.give_up(f"{error}" if late else repr(error))
            if caller is not None and not late:
                futures.wait([asked.result], _LAST_SECONDS)
        raise
    finally:
        asked.result.cancel()  # after a timeout or an interrupt; else it has ended
        del asked  # an error that it holds would refer to it by this frame
    spare.put(connection)  # not after an error: an answer may still be on its way
    return result


def _result_of(asked: _Asked[T]) -> T:
    try:
        while not asked.result.done():
            left = asked.caller.until - time.monotonic()
            if left <= 0:
                text = f"the process group's store has not answered within {asked.caller.seconds:g} s"
                raise dist.DistError(text)
            # Not with result(left): a signal handler may raise the error in which that ends, too.
            futures.wait([asked.result], min(left, threading.TIMEOUT_MAX))
        return asked.result.result()
    finally:
        del asked  # an error that it holds would refer to it by this frame


_LAST_SECONDS = 2.0
"""How long an interrupt waits for requests that end soon."""


class _Connection:
    """A connection to the store, and the thread that makes its requests; both end with this object."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        weakref.finalize(self, self.jobs.put, None).atexit = False
        threading.Thread(target=_serve, args=(self.jobs,), name="store", daemon=True).start()


def _serve(jobs: queue.SimpleQueue[Any]) -> None:
    connection = None
    while (asked := jobs.get()) is not None:
        _asked.add(asked)
        try:
            connection = _answer(connection, asked)
        finally:
            _asked.discard(asked)
            del asked


def _answer(connection: Any, asked: _Asked[T]) -> Any:
    """Give what was asked for; return the connection for the next requests."""
    try:
        _require_no_end()
        connection = connection or _connect()
        result = asked.requests(connection)
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        with contextlib.suppress(futures.InvalidStateError):
            asked.result.set_exception(error)
        del asked  # likewise
        return None
    try:
        asked.result.set_result(result)
    except futures.InvalidStateError:
        asked.undo(result)
    return connection if hasattr(connection, "clone") else None  # else it is the default group's own


def _require_no_end() -> None:
    if _ending.is_set():
        raise dist.DistError("this process ends")


def _connect() -> Any:
    store: Any = torch_compat.default_store()
    return store.clone() if hasattr(store, "clone") else store
