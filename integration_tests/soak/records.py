"""What a rank writes down while it trains: a line for each event, which is there even if the rank dies."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Record", "digests", "read", "resources"]


class Record:
    """Events of a rank, each with the time of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, event: str, **details: Any) -> None:
        """Write an event down, at once."""
        line = json.dumps({"time": time.monotonic(), "event": event, **details}) + "\n"
        os.write(self._descriptor, line.encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a rank until now."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def digests(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return what tells every tensor's bits from others."""
    return [
        hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes(), digest_size=6).hexdigest()
        for tensor in tensors
    ]


def resources() -> dict[str, int]:
    """Return how many descriptors, threads and KiB of memory this process holds."""
    open_files = list(Path("/proc/self/fd").iterdir())
    with Path("/proc/self/status").open() as file:
        status = dict(line.split(":", 1) for line in file)
    return {
        "descriptors": len(open_files) - 1,  # without that of the listing
        "sockets": sum(map(_is_socket, open_files)),
        "threads": threading.active_count(),
        "kernel_threads": int(status["Threads"]),
        "kibibytes": int(status["VmRSS"].split()[0]),
    }


def _is_socket(path: Path) -> bool:
    try:
        return str(path.readlink()).startswith("socket:")
    except OSError:  # that of the listing
        return False
