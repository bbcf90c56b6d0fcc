"""Check that no other user could have written the machine code that this process is about to run."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_ROOT = 0


class ForeignFileError(PermissionError):
    """Another user owns a file or folder with machine code, or may write it."""


def refuse_foreign_file(path: Path) -> None:
    """Raise if a user other than this one and root can change a file, or put another one in its place.

    Args:
        path: The file. For a link, its target counts, and the link's folder.

    Raises:
        ForeignFileError: Another user can.
        OSError: It does not exist, or cannot be examined.
    """
    _refuse(path)
    for folder in {path.absolute().parent, path.resolve().parent}:
        _refuse(folder, sticky_is_enough=True)


def make_own_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it, for this user alone, unless it is there.

    Raises:
        OSError: It cannot be made.
    """
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def _refuse(path: Path, *, sticky_is_enough: bool = False) -> None:
    if not hasattr(os, "geteuid"):  # no POSIX users
        return
    found = path.stat()
    if found.st_uid not in (os.geteuid(), _ROOT):
        raise ForeignFileError(
            f"{path} belongs to user {found.st_uid}, who could change what this process (of user "
            f"{os.geteuid()}) runs: use one of your own"
        )
    # In a folder with the sticky bit, such as /tmp, nobody can move or delete others' files.
    sticky = sticky_is_enough and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        mode = stat.S_IMODE(found.st_mode)
        raise ForeignFileError(
            f"{path} can be written by other users (mode {mode:04o}), who could change what this process "
            f"runs: chmod -R go-w {path}"
        )
