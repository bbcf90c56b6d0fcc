"""Connections to the job's store, each used by one thread at a time, whose answers have a time limit."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # not in its __all__

from dist_utils import torch_compat


class StoreSilenceError(TimeoutError):
    """The store has not answered: its process is stopped, or the link to it is cut."""


class _Connection(NamedTuple):
    """A store object, and its socket's descriptor where that is known."""

    store: Any
    descriptor: int | None


_lock = threading.Lock()
_spare: weakref.WeakKeyDictionary[Any, list[_Connection]] = weakref.WeakKeyDictionary()
"""Connections that nobody uses, by the store that they were cloned from."""
_silent: weakref.WeakSet[Any] = weakref.WeakSet()
"""Stores that have not answered. Connecting to one again could take a quarter of an hour."""


@contextlib.contextmanager
def store_connection(seconds: float) -> Iterator[Any]:
    """Lend a connection to the default group's store, which no other thread uses meanwhile.

    A request that waits in the store blocks all others on its connection, and ranks may wait for each other.
    torch 2.6 has one connection only, whose requests have no time limit.

    Args:
        seconds: How long a request may wait for its answer: most of torch's own wait until TCP gives up, for
            a quarter of an hour. Needs a system that lists open files in ``/dev/fd``, such as Linux.

    Raises:
        StoreSilenceError: A request was not answered, now or earlier.
    """
    store: Any = torch_compat.default_store()
    if not hasattr(store, "clone"):
        yield store
        return
    if store in _silent:
        raise StoreSilenceError("the store did not answer an earlier request: the link to it may be cut")
    with _lock:
        spare = _spare.setdefault(store, [])
        connection = spare.pop() if spare else _connect(store)
    _limit_answers(connection, seconds)
    try:
        yield connection.store
    except RuntimeError as error:
        if "Socket Timeout" not in str(error):  # torch's words for the end of such a wait
            raise
        _silent.add(store)
        raise StoreSilenceError(
            f"the store did not answer within {seconds:g} s: the link to it may be cut"
        ) from None
    spare.append(connection)  # not after an error: an answer may still be on its way


def _connect(store: Any) -> _Connection:
    server = store
    while isinstance(server, PrefixStore):
        server = server.underlying_store
    before = _sockets_to(server)
    clone = store.clone()
    new = _sockets_to(server) - before
    return _Connection(clone, new.pop() if len(new) == 1 else None)


def _sockets_to(server: Any) -> set[int]:
    """Return the descriptors of this process's connections to a server, where the system lists them."""
    found: set[int] = set()
    if not isinstance(server, TCPStore):
        return found
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):  # noqa: PTH208 - numbers, not files
            with contextlib.suppress(OSError), _borrow(int(name)) as connection:
                if connection.getpeername()[1:2] == (server.port,):
                    found.add(int(name))
    return found


def _limit_answers(connection: _Connection, seconds: float) -> None:
    if connection.descriptor is None:
        return
    limit = timedelta(seconds=seconds)
    value = struct.pack("@ll", limit.days * 86400 + limit.seconds, limit.microseconds)
    with _borrow(connection.descriptor) as borrowed:
        borrowed.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)


@contextlib.contextmanager
def _borrow(descriptor: int) -> Iterator[socket.socket]:
    """Give access to a socket that somebody else owns. Raises ``OSError`` for what is no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()
