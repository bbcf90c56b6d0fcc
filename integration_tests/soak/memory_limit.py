"""A control group whose memory limit ends a process, if this program may make one."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["limited", "why_not"]

_LIMITS = {  # folder and limit file of a control group, in both versions of cgroups
    Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes",
    Path("/sys/fs/cgroup"): "memory.max",
}
ROOM = 64 << 20


def _place() -> tuple[Path, str]:
    for folder, name in _LIMITS.items():
        if any((child / name).exists() for child in [folder, *_children(folder)]):
            return folder, name
    raise OSError("no control group of memory is mounted")


def _children(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if child.is_dir()] if folder.exists() else []


@contextlib.contextmanager
def limited() -> Iterator[Path]:
    """Yield a group with little memory; write a process id into its ``cgroup.procs``."""
    parent, name = _place()
    group = parent / f"soak-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / name).write_text(str(ROOM))
        yield group
    finally:
        for _ in range(100):  # until the last process has gone
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def why_not() -> str:
    """Return why there is none on this machine, or an empty string."""
    try:
        with limited():
            return ""
    except OSError as error:
        return str(error)
