"""Hypothesis for a limited time: a pytest plugin behind ``nox -s fuzz``, which selects only property tests.

Each test gets an equal share of ``FUZZ_MINUTES`` and is called again, with other random examples, until its
share is used up. A failure ends its turn: Hypothesis prints the smallest example, and how to repeat it.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

EXAMPLES_A_ROUND = 200
calls: defaultdict[str, int] = defaultdict(int)
seconds: dict[str, float] = {}


def _is_property(item: pytest.Item) -> bool:
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = [item for item in items if _is_property(item)]
    config.hook.pytest_deselected(items=[item for item in items if not _is_property(item)])
    items[:] = chosen
    for function in {item.obj for item in chosen}:  # type: ignore[attr-defined] # a test function has one
        here = function._hypothesis_internal_use_settings
        few = here.max_examples < 10  # each example starts processes, or is slow for another reason
        function._hypothesis_internal_use_settings = settings(
            here,
            max_examples=here.max_examples if few else EXAMPLES_A_ROUND,
            derandomize=False,
            database=None,
            print_blob=True,
            phases=set(here.phases) - {Phase.reuse},
            suppress_health_check=list(HealthCheck),
        )


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    began = time.monotonic()
    share = 60 * float(os.environ["FUZZ_MINUTES"]) / len(pyfuncitem.session.items)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        result = yield
        calls[pyfuncitem.nodeid] += 1
        while time.monotonic() - began < share:
            pyfuncitem.obj(**arguments)
            calls[pyfuncitem.nodeid] += 1
    finally:
        seconds[pyfuncitem.nodeid] = time.monotonic() - began
    return result


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write what was tried to the file ``FUZZ_RESULTS``, if it is set."""
    if path := os.environ.get("FUZZ_RESULTS"):
        tests = {name: {"rounds": calls[name], "seconds": round(seconds[name], 1)} for name in seconds}
        found = {"failed": session.testsfailed, "exit": int(exitstatus), "tests": tests}
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
