"""What happens inside a rank: an error of user code, no more memory."""

from __future__ import annotations

__all__ = ["UserError", "no_more_memory", "raise_here", "swell"]


class UserError(Exception):
    """The error of user code."""


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
