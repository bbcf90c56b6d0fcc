"""Inject many faults, one after another, and judge their outcomes."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from soak.faults import FAULTS, Job, draw
from soak.jobs import Runner
from soak.network import Network
from soak.verdicts import Reference, judge

ATTEMPTS = 4
"""If a rank waits for a core longer than a timeout, a training ends before its fault."""


def inject(options: Any, hosts: Network | str) -> Iterator[dict[str, Any]]:
    """Inject as many faults as the options of the command line say, and yield each outcome."""
    began, runner = time.monotonic(), Runner(hosts)
    references: dict[tuple[str, int], Reference] = {}
    faults = [name for name in FAULTS if not why_skipped(name, hosts)]
    for number in range(options.first, options.first + options.faults):
        if time.monotonic() - began > 60 * options.minutes:
            break
        yield run(runner, draw(options.seed, number, faults, options.training), references)


def run(runner: Runner, job: Job, references: dict[tuple[str, int], Reference]) -> dict[str, Any]:
    """Run a job, and once its training without a fault; return the outcome."""
    key = job.training, job.world_size
    if key not in references:
        undisturbed = replace(job, fault="", store="apart", timeout=60.0)
        references[key] = Reference(undisturbed, runner.run(undisturbed))
    began = time.monotonic()
    for _ in range(ATTEMPTS):
        outcome = judge(job, runner.run(job, references[key].step_seconds), references[key])
        if outcome["verdict"] != "void":
            break
        job = replace(job, timeout=2 * job.timeout)
    return {**outcome, "took": round(time.monotonic() - began, 1)}


def why_skipped(fault: str, hosts: Network | str) -> str:
    """Return why a fault cannot be injected on this machine, or nothing."""
    if FAULTS[fault].on_hosts and isinstance(hosts, str):
        return hosts
    return FAULTS[fault].why_not()
