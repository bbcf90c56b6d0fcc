"""The outcome of a backward pass's exchanges, which decides whether a step may follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch

__all__ = ["Outcome"]

T = TypeVar("T")


class Outcome:
    """Whether an exchange of a pass has raised, or has given a mean that is not finite. From any thread.

    Apart from the pass, because callbacks of collectives note it: they run on the process group's own
    threads, and may be the last to be dropped. One that owned the pass, and through it the state and its
    group, would end the group there, which then waits for that very thread and aborts the process.

    Attributes:
        broken: An exchange has raised.
    """

    def __init__(self) -> None:
        self.broken = False
        self._flags: list[torch.Tensor] = []
        self._any_flag: dict[torch.device, torch.Tensor] = {}

    def not_finite(self, flag: torch.Tensor) -> None:
        """Note whether a value of a mean is not finite, as a flag on any device."""
        self._flags.append(flag)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note an error: a step that raises will not be made."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def of(self, done: torch.futures.Future[T]) -> T:
        """Return the value of an exchange's future, and note its error: a callback."""
        with self.watching():
            return done.value()

    def of_mean(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """As :meth:`of`, and note whether the mean is not finite."""
        mean = self.of(done)
        self.not_finite(~(mean.coalesce().values() if mean.is_sparse else mean).isfinite().all())
        return mean

    def any_not_finite(self, device: torch.device) -> torch.Tensor:
        """Return on ``device`` whether a value of any mean was not finite. The exchanges must be over."""
        if device not in self._any_flag:
            for flag in self._flags:
                if flag.device.type != "cpu":  # made on a side stream, whose memory it is
                    flag.record_stream(torch.get_device_module(flag.device).current_stream(flag.device))
            here = [flag.to(device, non_blocking=True) for flag in self._flags]
            none = torch.zeros((), dtype=torch.bool, device=device)
            self._any_flag[device] = torch.stack([none, *here]).any()
        return self._any_flag[device]
