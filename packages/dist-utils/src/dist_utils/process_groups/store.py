"""Connections to the job's store, each used by one thread at a time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from dist_utils import torch_compat

_spare: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Connections that nobody uses, by the store that they were cloned from."""


@contextlib.contextmanager
def store_connection() -> Iterator[Any]:
    """Lend a connection to the default group's store, which no other thread uses meanwhile.

    A request that waits in the store blocks all others on its connection, and ranks may wait for each other.
    torch 2.6 has one connection only. If the store's process is stopped, or the link to it is cut, a request
    waits as torch's own do, until the process goes on or TCP gives up.
    """
    store: Any = torch_compat.default_store()
    if not hasattr(store, "clone"):
        yield store
        return
    spare = _spare.setdefault(store, [])
    connection = spare.pop() if spare else store.clone()
    yield connection
    spare.append(connection)  # not after an error: an answer may still be on its way
