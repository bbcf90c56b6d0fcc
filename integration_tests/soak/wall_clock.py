"""A wall clock that jumps in one process: time namespaces move only the monotonic ones.

A small preloaded library replaces functions of the C library, so torch and Gloo see the jump, too. Without a
compiler only Python's ``time.time`` jumps.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from pathlib import Path

__all__ = ["how", "jump", "preload"]


def preload(folder: Path) -> str:
    """Give processes that are started from now on such a clock; return how."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    library = folder / "wall_clock.so"
    if compiler:
        source = Path(__file__).with_name("wall_clock.c")
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            os.environ["LD_PRELOAD"] = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    return how()


def how() -> str:
    """Return which clock jumps."""
    if "wall_clock.so" in os.environ.get("LD_PRELOAD", ""):
        return "the C library's wall clock, by a preloaded library"
    return "Python's time.time only: no compiler"


def jump(seconds: float) -> None:
    """Set this process's wall clock forwards or back."""
    loaded = getattr(ctypes.CDLL(None), "soak_jump", None)
    if loaded is not None:
        loaded(ctypes.c_long(int(seconds)))
        return
    real = time.time
    time.time = lambda: real() + seconds
