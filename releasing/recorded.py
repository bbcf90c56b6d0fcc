"""Result files of runs, from which docs/compatibility.md is made.

``python -m releasing.recorded mypy 2.6.0`` records that this session passed with that torch.
"""

from __future__ import annotations

import json
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from releasing.commands import git
from releasing.workspace import ROOT

FOLDER = ROOT / "benchmarks" / "results" / "compatibility"


def about_this_run(root: Path = ROOT) -> dict[str, str]:
    """Return the date, the system and the commit of a run."""
    changed = git(root, "status", "--porcelain", "--untracked-files=no", "--", "packages").strip()
    return {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "commit": git(root, "rev-parse", "--short=12", "HEAD").strip() + (" with changes" if changed else ""),
        "system": f"{platform.system()} {platform.machine()}",
    }


def write(name: str, result: dict[str, Any], folder: Path = FOLDER) -> Path:
    """Write a run's result under ``name`` and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.json"
    file.write_text(json.dumps(result, indent=1, sort_keys=False) + "\n")
    return file


def read(name: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the recorded result ``name``, or None."""
    file = folder / f"{name}.json"
    if not file.exists():
        return None
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def main(session: str, torch: str) -> None:
    """Record a session that counts no tests; if it had failed, this would not be called."""
    python = platform.python_version()
    minor = ".".join(python.split(".")[:2])
    result = {**about_this_run(), "session": session, "torch": torch, "python": python, "exit_status": 0}
    write(f"{session}-torch-{torch}-python-{minor}", result)


if __name__ == "__main__":
    main(*sys.argv[1:])
