"""Errors of user code, and other events inside a rank at one place of one step."""

from __future__ import annotations

from collections.abc import Callable

from soak import wall_clock

__all__ = ["UserError", "arm", "at", "begin"]


class UserError(Exception):
    """The error of user code."""


_actions: dict[tuple[str, int], Callable[[], object]] = {}
_step = -1


def arm(place: str, step: int, action: Callable[[], object]) -> None:
    """Call ``action()`` once when this rank reaches a place in a step."""
    _actions[place, step] = action


def begin(step: int) -> None:
    """Begin a step."""
    global _step  # noqa: PLW0603 - one process, one rank
    _step = step
    at("begin")


def at(place: str) -> None:
    """Mark that user code has reached a place."""
    if action := _actions.pop((place, _step), None):
        action()


def raise_here() -> None:
    """Raise as user code does."""
    raise UserError("user code failed")


def swell() -> None:
    """Allocate memory until the system ends this process or an allocation fails."""
    held = []
    while True:
        held.append(bytearray(1 << 22))
        held[-1][:: 1 << 12] = bytes(len(range(0, 1 << 22, 1 << 12)))


def no_more_memory() -> None:
    """Let every further request for address space fail."""
    import resource  # noqa: PLC0415 - not on every system

    with open("/proc/self/statm") as file:  # noqa: PTH123 - takes no extra memory
        pages = int(file.read().split()[0])
    held = pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))


def jump(seconds: float) -> None:
    """Set this process's wall clock."""
    wall_clock.jump(seconds)
