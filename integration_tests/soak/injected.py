"""Inject many faults, one after another, and judge their outcomes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trainings import TRAININGS

from soak.faults import FAULTS, Job, draw
from soak.jobs import Runner
from soak.network import Network, network
from soak.verdicts import Reference, judge

__all__ = ["inject", "run", "why_skipped"]

HOSTS, ATTEMPTS = 4, 4
"""Emulated hosts; and attempts per fault: if a rank waits for a core longer than a timeout, a training ends
before its fault."""


def inject(options: Any, write: Callable[[dict[str, Any]], None]) -> dict[str, str]:
    """Inject as many faults as the options say, and write each outcome.

    Args:
        options: The options of the command line.
        write: Called with each outcome.

    Returns:
        The faults that this machine cannot inject, and why.
    """
    began = time.monotonic()
    with network(HOSTS) as hosts:
        runner = Runner(hosts)
        references: dict[tuple[str, int], Reference] = {}
        skipped = {name: why for name in FAULTS if (why := why_skipped(name, hosts))}
        faults = [name for name in FAULTS if options.only in name and name not in skipped]
        trainings = [name for name in TRAININGS if options.training in name]
        for number in range(options.first, options.first + options.faults):
            if time.monotonic() - began > 60 * options.minutes:
                break
            write(run(runner, draw(options.seed, number, faults, trainings), references))
        return skipped


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
