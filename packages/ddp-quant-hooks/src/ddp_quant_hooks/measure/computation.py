"""Computation that stands in for a model's: units of work of about a millisecond."""

from __future__ import annotations

import time

import torch

__all__ = ["Computation", "processor_time", "synchronize"]

_WIDTH = 512
_SHORTEST = 1e-3
_ALONE = 0.03


def synchronize(device: torch.device) -> None:
    """Return when ``device`` has finished all its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def processor_time(device: torch.device) -> float:
    """Return the seconds of all threads of this process; always 0 where an accelerator computes."""
    return time.process_time() if device.type == "cpu" else 0.0


class Computation:
    """Matrix products of a size that takes a millisecond here.

    Args:
        device: The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alone_seconds, self._alone_units = 0.0, 0
        # The caller's random numbers stay as they are: how many are drawn here differs between ranks.
        self._random = torch.Generator(device).manual_seed(0)
        self._weights = self._normal(_WIDTH) / _WIDTH**0.5
        rows = 16
        self._resize(rows)
        while self._time_units(5) < 5 * _SHORTEST and rows < 1 << 20:
            rows *= 2
            self._resize(rows)

    def _normal(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, _WIDTH, generator=self._random, device=self._device, dtype=torch.float32)

    def _resize(self, rows: int) -> None:
        self._input = self._normal(rows)
        self._output = torch.empty_like(self._input)
        self.run_unit()

    def run_unit(self) -> None:
        """Compute one unit."""
        torch.mm(self._input, self._weights, out=self._output)
        synchronize(self._device)

    def _time_units(self, count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            self.run_unit()
        return time.perf_counter() - began

    def run_alone(self) -> None:
        """Compute alone for a while. Repeated now and then, as other programs come and go."""
        began = time.perf_counter()
        while time.perf_counter() - began < _ALONE:
            self.run_unit()
            self._alone_units += 1
        self._alone_seconds += time.perf_counter() - began

    @property
    def seconds_per_unit(self) -> float:
        """The mean time of a unit when nothing else runs."""
        return self._alone_seconds / self._alone_units if self._alone_units else 0.0
