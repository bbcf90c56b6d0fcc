"""A control group whose memory limit ends a process, if this program may make one."""

import os

import memory

ROOM = 64 << 20


def name_of(process: int | None) -> str:
    """Return the name of a process's control group."""
    return f"soak-{process}"


def exceed(*_: object) -> None:
    """Limit the memory of this process, and allocate until the system ends it."""
    group = memory.make_group(name_of(os.getpid()), ROOM)
    (group / "cgroup.procs").write_text(str(os.getpid()))
    held = []
    while True:
        held.append(bytearray(1 << 22))
        held[-1][:: 1 << 12] = bytes(len(range(0, 1 << 22, 1 << 12)))


def remove(process: int | None) -> None:
    """Remove the group of a process that has ended, if it has one."""
    memory.remove_group(name_of(process))


def why_not() -> str:
    """Return why there is none on this machine, or an empty string."""
    try:
        memory.make_group(name_of(os.getpid()), ROOM)
    except OSError as error:
        return str(error)
    finally:
        remove(os.getpid())
    return ""
