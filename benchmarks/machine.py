"""Describe the machine and the tree of a benchmark."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return the date, the machine and the versions, for the head of a result file."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def describe_tree() -> str:
    """Return the measured commit, followed by a plus if files other than results differ from it."""
    commit = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")
    return f"{commit}+" if changed else commit or "unknown"


def _git(*command: str) -> str:
    done = subprocess.run(
        ("git", *command), cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
