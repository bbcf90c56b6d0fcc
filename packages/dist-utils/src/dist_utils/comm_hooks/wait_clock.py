"""How long ``backward()`` waited for averages, on the host or on an accelerator's stream."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dist_utils.torch_compat import at_end_of_backward, graph_task_id


class Mark:
    """A point in time: now, or when an accelerator's current stream gets there. Making one does not block.

    Args:
        device: The device whose time is recorded.

    Example:
        >>> begin = Mark(torch.device("cpu"))
        >>> Mark(torch.device("cpu")).seconds_since(begin) >= 0
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event: Any = None
        if device.type != "cpu":
            accelerator: Any = torch.get_device_module(device)
            self._event = accelerator.Event(enable_timing=True)
            self._event.record(accelerator.current_stream(device))

    def is_past(self) -> bool:
        """Return whether the time has come. Does not wait."""
        return self._event is None or bool(self._event.query())

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds between two marks of one device. Waits until both are past."""
        if self._event is None:
            return self._host - earlier._host
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class WaitClock:
    """Adds up how long backward passes waited at their ends, from their last node to the end of DDP's part.

    Passes that are captured in a CUDA graph are left out.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._running: set[int] = set()
        """The backward passes whose ends are awaited."""
        self._waits: deque[tuple[Mark, Mark]] = deque()
        """Begin and end of waits that are not in the sum, because an accelerator was not there yet."""

    def bucket_came(self, device: torch.device, at_end: Callable[[], None] | None = None) -> None:
        """Measure the end of the backward pass that this thread is running, if there is one.

        Call it before DDP's own end is queued: in a hook.

        Args:
            device: Whose time is measured.
            at_end: Called when the pass has ended.
        """
        task = graph_task_id()
        if task == -1 or task in self._running:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        self._running.add(task)
        at_end_of_backward(partial(self._begin_wait, task, device, at_end))

    def seconds(self) -> float:
        """Return the sum of the waits that are over. Does not wait for an accelerator."""
        while self._waits and self._waits[0][1].is_past():
            begin, end = self._waits.popleft()
            self._seconds += end.seconds_since(begin)
        return self._seconds

    def _begin_wait(self, task: int, device: torch.device, at_end: Callable[[], None] | None) -> None:
        self._running.discard(task)
        # Queued behind DDP's own end.
        at_end_of_backward(partial(self._end_wait, device, Mark(device), at_end))

    def _end_wait(self, device: torch.device, begin: Mark, at_end: Callable[[], None] | None) -> None:
        self._waits.append((begin, Mark(device)))
        self.seconds()  # few waits are kept
        if at_end is not None:
            at_end()
