"""The result file of a soak run: a head, and one line per outcome."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from machine import describe_machine, describe_tree

__all__ = ["RESULTS", "load", "save"]

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "soak.json"
LISTS = ("outcomes", "restarts", "long_runs", "churn")
"""Parts of the file that are lists, written with one line per entry."""


def head() -> dict[str, Any]:
    """Return the machine, the versions and the commit."""
    return {**describe_machine(), "commit": describe_tree(), "system": " ".join(os.uname()[::2])}


def load(path: Path) -> dict[str, Any]:
    """Return the contents of a file."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results atomically."""
    parts = []
    for name, value in results.items():
        if name in LISTS:
            lines = ",\n  ".join(json.dumps(entry) for entry in value)
            parts.append(f'"{name}": [\n  {lines}\n ]')
        else:
            parts.append(f'"{name}": {json.dumps(value)}')
    new = path.with_suffix(".new")
    new.write_text("{\n " + ",\n ".join(parts) + "\n}\n")
    new.replace(path)
