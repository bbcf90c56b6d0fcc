"""Compiled GPU kernels on disk. Needs ``cuda-core``."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from cuda.core.utils import FileStreamProgramCache

from ddp_quant_hooks.kernels.owned_files import make_own_folder, refuse_foreign_folder

__all__ = ["open_cache"]

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


class _CheckedCache(FileStreamProgramCache):  # type: ignore[misc] # has no types
    """cuda-core's cache (whole entries, keyed by source, options and NVRTC version), with checksums.

    A damaged entry counts as missing, and one that cannot be written is not kept.
    """

    def __getitem__(self, key: bytes | str) -> bytes:
        try:
            entry = bytes(super().__getitem__(key))
        except OSError as error:  # such as another user's file
            _log.warning("a compiled kernel on disk cannot be read: %s", error)
            raise KeyError(key) from error
        digest, code = entry[:_DIGEST_BYTES], entry[_DIGEST_BYTES:]
        if hashlib.sha256(code).digest() != digest:
            _log.warning("a compiled kernel is damaged on disk: compiling it again")
            raise KeyError(key)
        return code

    def __setitem__(self, key: bytes | str, value: Any) -> None:
        code = bytes(getattr(value, "code", value))
        try:
            super().__setitem__(key, hashlib.sha256(code).digest() + code)
        except OSError as error:
            _log.warning("a compiled kernel is not kept on disk: %s", error)


def open_cache(folder: Path) -> FileStreamProgramCache | None:
    """Return the cache in a folder; ``None``, with a line in the log, if there can be none.

    The folder is made if necessary, for this user alone. One that another user could write is not used:
    checksums detect damage, not code that somebody put there.
    """
    try:
        for part in (folder, folder / "entries", folder / "tmp"):
            make_own_folder(part)
        refuse_foreign_folder(folder)
        return _CheckedCache(folder)
    except OSError as error:
        _log.warning("compiled kernels are not kept on disk: %s", error)
        return None
