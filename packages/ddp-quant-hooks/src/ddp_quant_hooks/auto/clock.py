"""Points in time, on the host or on an accelerator's stream."""

from __future__ import annotations

import time
from typing import Any

import torch


class Mark:
    """A point in time: now, or when an accelerator's current stream gets there. Making one does not block.

    Args:
        device: The device whose time is recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._host = time.perf_counter()
        self._event: Any = None
        if device.type != "cpu":
            accelerator: Any = torch.get_device_module(device)
            self._event = accelerator.Event(enable_timing=True)
            self._event.record(accelerator.current_stream(device))

    def seconds_since(self, earlier: Mark) -> float:
        """Return the seconds between two marks of one device. Waits until both are past."""
        if self._event is None:
            return self._host - earlier._host
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
