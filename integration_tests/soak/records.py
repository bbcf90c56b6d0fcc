"""The record of a rank: one line per event, which survives the death of the rank."""

import ctypes
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


class Record:
    """Events of a rank, each with the time of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **details: Any) -> None:
        """Write an event at once."""
        line = json.dumps({"time": time.monotonic(), "event": event, **details}) + "\n"
        os.write(self._descriptor, line.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a rank so far."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def first(events: list[dict[str, Any]], name: str) -> dict[str, Any] | None:
    """Return the first event of a name, if there is one."""
    return next((event for event in events if event["event"] == name), None)


def digests(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return a digest of each tensor's bits."""
    as_bytes = (tensor.detach().flatten().view(torch.uint8) for tensor in tensors)  # NumPy has no bf16
    return [hashlib.blake2b(flat.numpy().tobytes(), digest_size=6).hexdigest() for flat in as_bytes]


def resources() -> dict[str, int]:
    """Return the number of descriptors and threads of this process, and its KiB of memory in use.

    ``heap`` is what the C library has allocated, which fragmentation does not change; left out where it
    cannot tell.
    """
    open_files = list(Path("/proc/self/fd").iterdir())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "descriptors": len(open_files) - 1,  # without the descriptor of this listing
        "sockets": sum(path.is_socket() for path in open_files),
        "threads": threading.active_count(),
        "kernel_threads": len(list(Path("/proc/self/task").iterdir())),
        "resident": pages * mmap.PAGESIZE // 1024,
        **_heap(),
    }


class _MallocInfo(ctypes.Structure):
    """The C library's ``struct mallinfo2``."""

    _fields_ = [("sizes", ctypes.c_size_t * 10)]


_mallinfo2: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc from 2.33 on
if _mallinfo2 is not None:
    _mallinfo2.restype = _MallocInfo


def _heap() -> dict[str, int]:
    if _mallinfo2 is None:
        return {}
    sizes = _mallinfo2().sizes
    return {
        "heap": (sizes[4] + sizes[7]) // 1024
    }  # hblkhd and uordblks: in blocks of their own, and elsewhere
