"""How much memory a process takes or may take, and what its allocator does with it; Linux with glibc."""

from __future__ import annotations

import contextlib
import ctypes
import time
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


_GROUPS = {  # folder and limit file of control groups, in both versions of them
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}


def make_group(name: str, limit: int) -> Path:
    """Make a control group whose processes together may take ``limit`` bytes; return its folder.

    Raises:
        OSError: This program may not, or there are none.
    """
    for parent, file in _GROUPS.items():
        if (parent / file).exists() or any(parent.glob(f"*/{file}")):
            group = parent / name
            group.mkdir()
            (group / file).write_text(str(limit))
            return group
    raise OSError("no control group of memory is mounted")


def remove_group(name: str) -> None:
    """Remove a control group, if there is one of this name, when its last process has gone."""
    for group in (parent / name for parent in _GROUPS):
        for _ in range(100):
            if not group.exists():
                break
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
