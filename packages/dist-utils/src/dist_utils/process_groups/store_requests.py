"""Requests to a store that end at a deadline, even if its server is gone."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from dist_utils.process_groups.thread_starts import start_thread

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["StoreRequests"]

T = TypeVar("T")

_LEAST_SECONDS = 2.0
"""The least time of a request, even after the deadline: a rank that stops waiting must tell the others."""


class StoreRequests:
    """Sends requests to a store on a thread of its own.

    Most requests of torch's ``TCPStore`` have no timeout: if the server is cut off, as by a broken link,
    neither an answer nor an error comes while TCP keeps trying, for a quarter of an hour. A thread that waits
    like this cannot be ended. It holds its connection, but does not keep the process from ending.

    Args:
        store: A store of torch.
        seconds: Until the deadline, from now.

    Raises:
        TimeoutError, RuntimeError, MemoryError: The thread cannot be started.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self._deadline = time.monotonic() + seconds
        self._requests: queue.SimpleQueue[tuple[Callable[[Any], Any], queue.SimpleQueue[Any]] | None]
        self._requests = queue.SimpleQueue()
        start_thread(self._answer, name="store requests", seconds=seconds)

    def ask(self, request: Callable[[Any], T]) -> T:
        """Return what a request returns, or raise what it raises.

        Raises:
            TimeoutError: The store has not answered.
        """
        answers: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()
        self._requests.put((request, answers))
        try:
            answer, error = answers.get(timeout=max(_LEAST_SECONDS, self._deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError(
                f"the store did not answer within {self._seconds:g} s: the link to it may be cut"
            ) from None
        if error is not None:
            raise error
        return answer  # type: ignore[return-value] # a T, as there is no error

    def _answer(self) -> None:
        while (asked := self._requests.get()) is not None:
            request, answers = asked
            try:
                answers.put((request(self._store), None))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must see it
                answers.put((None, error))
            del asked, request, answers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.put(None)
