"""Times in a backward pass: by the host's clock, or by events of an accelerator."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch

__all__ = ["Arriving", "Mark", "PassTimes"]


class Mark:
    """A point in time: now, or when an accelerator's current stream gets there. Making one does not block.

    Args:
        device: The device whose time is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = time.perf_counter()
        self._event: Any = None
        if device.type != "cpu":
            accelerator: Any = torch.get_device_module(device)
            self._event = accelerator.Event(enable_timing=True)
            self._event.record(accelerator.current_stream(device))

    def wait(self) -> None:
        """Return when that time is past."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float | None:
        """Return the seconds between two marks, ``None`` for marks of different devices. Waits for both."""
        if self._device != earlier._device:
            return None
        if self._event is None:
            return self._host - earlier._host
        earlier.wait()
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class Arriving:
    """A small tensor that is being copied to the host on the current stream.

    Args:
        values: The tensor.
    """

    def __init__(self, values: torch.Tensor) -> None:
        on_accelerator = values.device.type != "cpu"
        self._host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=on_accelerator)
        self._host.copy_(values, non_blocking=True)
        self._there = Mark(values.device)

    def read(self) -> list[float]:
        """Wait for the values and return them."""
        self._there.wait()
        return [float(value) for value in self._host.view(-1)]


class _Exchange(NamedTuple):
    """The exchange of one bucket, with the bucket's size in bytes."""

    size: int
    handed_over: Mark
    ended: Mark


class PassTimes:
    """The times of one backward pass. Holds no state and no group, as callbacks of exchanges write into it.

    Attributes:
        began: When its first bucket arrived.
        ended: When the first bucket of the next pass arrived, so that optimizer and forward are included.
    """

    def __init__(self) -> None:
        self.began: Mark | None = None
        self.ended: Mark | None = None
        self._exchanges: list[_Exchange | None] = []

    def watch(
        self, size: int, handed_over: Mark, device: torch.device, averaged: torch.futures.Future[Any]
    ) -> torch.futures.Future[Any]:
        """Return a future with the result of ``averaged``, and record when that arrived.

        Args:
            size: Bytes of the bucket.
            handed_over: When the hook was called.
            device: The device of the bucket.
            averaged: From the hook.
        """
        place = len(self._exchanges)
        self._exchanges.append(None)
        exchanges = self._exchanges

        def note(done: torch.futures.Future[Any]) -> Any:
            exchanges[place] = _Exchange(size, handed_over, Mark(device))  # on a stream after the exchange
            return done.value()

        return averaged.then(note)

    @property
    def seconds(self) -> float | None:
        """How long a whole step took."""
        return None if self.began is None or self.ended is None else self.ended.seconds_since(self.began)

    def services(self) -> dict[int, float]:
        """Return the median seconds that a bucket of each size took.

        Each is timed from when it was handed over or, if later, its predecessor ended, until it ended itself.
        """
        found: dict[int, list[float]] = {}
        previous: _Exchange | None = None
        for exchange in self._exchanges:
            if exchange is None:
                continue
            own = exchange.ended.seconds_since(exchange.handed_over)
            behind = None if previous is None else exchange.ended.seconds_since(previous.ended)
            if own is not None:
                seconds = own if behind is None else min(own, behind)
                found.setdefault(exchange.size, []).append(max(seconds, 0.0))
            previous = exchange
        return {size: statistics.median(seconds) for size, seconds in found.items()}
