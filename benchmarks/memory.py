"""How much memory a process takes, and what its allocator does with freed memory; Linux with glibc."""

from __future__ import annotations

import ctypes
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # constants in glibc's malloc.h


def keep_freed_memory() -> None:
    """Let the allocator keep freed memory: new pages would cost more than the compared effects."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, 2**25)
    libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def return_freed_memory() -> None:
    """Let the allocator keep no freed tensor, because what it keeps differs from run to run."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 2**17)


def begin_peak() -> float:
    """Return freed memory to the system and reset the peak; return the MiB that the process takes now."""
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would hide new allocations
    forget_peak()
    return now()


def forget_peak() -> None:
    """Reset the peak to what the process takes now."""
    Path("/proc/self/clear_refs").write_text("5")


def now() -> float:
    """Return the MiB that the process takes."""
    return _status("VmRSS")


def peak() -> float:
    """Return the most MiB that the process took since the peak was reset."""
    return _status("VmHWM")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
