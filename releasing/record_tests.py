"""A pytest plugin that writes down how a run ended: ``-p releasing.record_tests``.

The nox sessions switch it on where ``RECORD`` is set. The file's name has the session, torch and Python; a
later run of the same three replaces it.
"""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from releasing import recorded

COUNTED = ["passed", "failed", "error", "skipped", "xfailed"]


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: Any) -> None:
    """Write the numbers of tests, and which were asked for."""
    torch, python = version("torch"), platform.python_version()
    session = os.environ.get("NOX_CURRENT_SESSION", "tests").split("(")[0]
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in COUNTED}
    root = Path(__file__).parents[1]
    asked = [os.path.relpath(argument, root) for argument in config.args]
    minor = ".".join(python.split(".")[:2])
    file = recorded.write(
        f"{session}-torch-{torch.split('+')[0]}-python-{minor}",
        {
            **recorded.about_this_run(),
            "session": session,
            "torch": torch,
            "python": python,
            "selected": asked,
            "exit_status": int(exitstatus),
            **{name: count for name, count in counts.items() if count},
        },
    )
    terminalreporter.write_line(f"written: {file}")
