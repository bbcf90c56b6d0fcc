"""The outcome of a backward pass's exchanges, which determines whether a step may follow."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TypeVar

import torch

__all__ = ["Outcome"]

T = TypeVar("T")


class Outcome:
    """Whether an exchange of a pass has raised, or has given a mean that is not finite. For any thread.

    Separate from the pass, because callbacks of collectives write to it. They run on the process group's own
    threads, which may be the last to drop them. A callback that owned the pass, and through it the state and
    the group, would end the group on that thread; the group would wait for the same thread, and abort the
    process.

    Attributes:
        broken: Whether an exchange has raised.
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
        """Note an error in the block: no step follows it."""
        try:
            yield
        except BaseException:
            self.broken = True
            raise

    def of(self, done: torch.futures.Future[T]) -> T:
        """Return the value of an exchange's future, or note its error. For callbacks."""
        with self.watching():
            return done.value()

    def of_mean(self, done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        """Like :meth:`of`, and note whether the mean is not finite."""
        mean = self.of(done)
        self.not_finite(~(mean.coalesce().values() if mean.is_sparse else mean).isfinite().all())
        return mean

    def any_not_finite(self, device: torch.device) -> torch.Tensor:
        """Return on ``device`` whether a value of any mean was not finite. The exchanges must be over."""
        if device not in self._any_flag:
            for flag in self._flags:
                if flag.device.type != "cpu":  # made on a side stream, which owns its memory
                    flag.record_stream(torch.get_device_module(flag.device).current_stream(flag.device))
            here = [flag.to(device, non_blocking=True) for flag in self._flags]
            none = torch.zeros((), dtype=torch.bool, device=device)
            self._any_flag[device] = torch.stack([none, *here]).any()
        return self._any_flag[device]
