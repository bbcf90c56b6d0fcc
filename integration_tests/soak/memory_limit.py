"""A control group whose memory limit ends a process, if this program may make one."""

import contextlib
import os
import time
from pathlib import Path

_LIMITS = {  # folder and limit file of a control group, in both versions of cgroups
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}
ROOM = 64 << 20


def _make(process: int) -> Path:
    """Make a group with little memory for a process."""
    for parent, name in _LIMITS.items():
        if (parent / name).exists() or any(parent.glob(f"*/{name}")):
            group = parent / f"soak-{process}"
            group.mkdir()
            (group / name).write_text(str(ROOM))
            return group
    raise OSError("no control group of memory is mounted")


def exceed(*_: object) -> None:
    """Limit the memory of this process, and allocate until the system ends it."""
    (_make(os.getpid()) / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(bytearray(1 << 22))
        held[-1][:: 1 << 12] = bytes(len(range(0, 1 << 22, 1 << 12)))


def remove(process: int | None) -> None:
    """Remove the group of a process that has ended, if it has one."""
    for group in (parent / f"soak-{process}" for parent in _LIMITS):
        for _ in range(100):  # until the process has left it
            if not group.exists():
                break
            with contextlib.suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


def why_not() -> str:
    """Return why there is none on this machine, or an empty string."""
    try:
        _make(os.getpid())
    except OSError as error:
        return str(error)
    finally:
        remove(os.getpid())
    return ""
