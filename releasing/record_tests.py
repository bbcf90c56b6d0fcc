"""A pytest plugin that records the outcome of a run: ``-p releasing.record_tests``.

The nox sessions enable it if ``RECORD`` is set, and put the requested selection into ``RECORDED_SELECTION``.
The file's name has the session, torch and Python; a later run of the same three replaces it.
"""

from __future__ import annotations

import os
import platform
import shlex
from importlib.metadata import version
from typing import Any

import pytest

from releasing import recorded

COUNTED = ["passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected"]
LEFT_OUT = pytest.StashKey[int]()


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count deselected tests in a worker of pytest-xdist, because its controller does not get them."""
    config = items[0].config
    config.stash[LEFT_OUT] = config.stash.get(LEFT_OUT, 0) + len(items)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the number of deselected tests to the controller, if this is a worker."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["deselected"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take one worker's count, because each of them collects and deselects the same tests."""
    if (count := getattr(node, "workeroutput", {}).get("deselected")) is not None:
        node.config.stash[LEFT_OUT] = count


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Write the numbers of tests, and which were asked for; a worker of pytest-xdist knows a part of them."""
    if hasattr(config, "workerinput"):
        return
    torch, python = version("torch"), platform.python_version()
    session = os.environ.get("NOX_CURRENT_SESSION", "tests").split("(")[0]
    counts = {name: len(terminalreporter.stats.get(name, [])) for name in COUNTED}
    counts["deselected"] = config.stash.get(LEFT_OUT, 0)
    minor = ".".join(python.split(".")[:2])
    file = recorded.write(
        f"{session}-torch-{torch.split('+')[0]}-python-{minor}",
        {
            **recorded.about_this_run(),
            "session": session,
            "torch": torch,
            "python": python,
            "selected": os.environ.get("RECORDED_SELECTION") or shlex.join(config.invocation_params.args),
            "exit_status": int(exitstatus),
            **{name: count for name, count in counts.items() if count},
        },
    )
    terminalreporter.write_line(f"written: {file}")
