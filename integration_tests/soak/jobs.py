"""Run a job: start its ranks, inject its fault at its moment, and collect every rank's record."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from dist_utils.testing import patience
from soak import memory_limit, records
from soak.faults import Job
from soak.network import Network
from soak.rank import Place, be_rank, keep_store

__all__ = ["Ended", "Runner"]

_LOOK_SECONDS = 0.004
_PRELOADED = ["dist_utils.testing.server", "soak.rank"]
_HUNG_SECONDS = 20.0
"""Far beyond every promised time: a rank that has not ended by then hangs."""


class Ended(NamedTuple):
    """The records of a finished job."""

    records: list[list[dict[str, Any]]]  # of each rank
    exit_codes: list[int | None]  # None: it hung
    injected: float | None  # when
    ended: list[float]  # when each rank's process ended
    stacks: dict[int, str]  # of those that hung
    left: list[int]  # processes that outlived their rank
    broken: list[str]  # checkpoints that cannot be read
    note: str


class Runner:
    """Runs jobs, one at a time.

    Args:
        network: Emulated hosts for link faults, or the reason why there are none.
    """

    def __init__(self, network: Network | str) -> None:
        self._network = network
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)

    def run(self, job: Job, step_seconds: float = 0.05) -> Ended:
        """Run a job to its end.

        Args:
            job: The job.
            step_seconds: How long a step takes, to time the fault.
        """
        with tempfile.TemporaryDirectory(prefix="soak_") as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            places = self._places(job)
            if job.store == "apart":
                keeper = self._start(keep_store, places[0], folder / "store")
                stack.callback(_end, keeper)
                _wait_until((folder / "store").exists, 120.0)
            ranks = [self._start(be_rank, job, rank, place, folder) for rank, place in enumerate(places)]
            for process in ranks:
                stack.callback(_end, process)
            return _Watch(job, ranks, folder, self._network).until_the_end(step_seconds)

    def _start(self, target: Callable[..., None], *arguments: Any) -> BaseProcess:
        process: BaseProcess = self._context.Process(target=target, args=arguments)
        process.start()
        return process

    def _places(self, job: Job) -> list[Place]:
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        if not job.on_hosts:
            return [Place(0, ("127.0.0.1", port), "lo")] * job.world_size
        assert isinstance(self._network, Network)
        store = (self._network.address(0), port)
        return [Place(self._network.holder(rank), store, "eth0") for rank in range(job.world_size)]


class _Watch:
    """Watches the ranks of one job."""

    def __init__(self, job: Job, ranks: list[BaseProcess], folder: Path, network: Network | str) -> None:
        self._job, self._ranks, self._folder = job, ranks, folder
        self._network = network
        self._ended: list[float | None] = [None] * len(ranks)
        self._note = ""
        self._injected: float | None = None

    def until_the_end(self, step_seconds: float) -> Ended:
        with contextlib.ExitStack() as stack:
            if self._job.fault:
                self._inject(step_seconds, stack)
            limit = patience(self._job.timeout + _HUNG_SECONDS)
            self._wait(lambda: None not in self._ended, limit)
            stacks = {rank: self._stack(rank) for rank, when in enumerate(self._ended) if when is None}
        found = [records.read(self._folder / f"record-{rank}") for rank in range(len(self._ranks))]
        return Ended(
            found,
            [process.exitcode for process in self._ranks],
            self._injected or _time_of(found[self._job.victim], "injected"),
            [when or time.monotonic() for when in self._ended],
            stacks,
            [pid for process in self._ranks for pid in _session(process.pid) if pid != process.pid],
            list(self._unreadable()),
            self._note,
        )

    def _inject(self, step_seconds: float, stack: contextlib.ExitStack) -> None:
        job = self._job
        if job.kind.where not in {"outside", "link"} and "killed" not in job.fault:
            return  # the rank injects it itself
        victim = self._ranks[job.victim]
        if not self._wait(lambda: self._begun() or None not in self._ended, 120.0) or not self._begun():
            return
        if "killed" in job.fault:
            group = stack.enter_context(memory_limit.limited())
            (group / "cgroup.procs").write_text(str(victim.pid))
            (self._folder / "limited").touch()
            return
        time.sleep(job.moment * step_seconds)
        self._injected = time.monotonic()
        if job.fault == "kill -9":
            _signal(victim, signal.SIGKILL)
        elif job.kind.where == "link":
            self._trouble_link(stack)
        else:
            _signal(victim, signal.SIGSTOP)
            self._wait(lambda: False, job.length)
            _signal(victim, signal.SIGCONT)

    def _trouble_link(self, stack: contextlib.ExitStack) -> None:
        assert isinstance(self._network, Network)
        network, victim = self._network, self._job.victim
        stack.callback(network.repair, victim)
        changes = {"link cut": network.cut, "packets lost": network.lose}
        changes.get(self._job.fault, network.slow)(victim)
        if self._job.fault == "link cut":
            return
        self._wait(lambda: None not in self._ended, self._job.length)
        if self._job.fault == "packets lost":
            self._note = f"{network.lost(victim)} packets lost"
        network.repair(victim)

    def _begun(self) -> bool:
        """Return whether the victim has reached its place or its step."""
        events = records.read(self._folder / f"record-{self._job.victim}")
        if "killed" in self._job.fault:
            return _time_of(events, "injected") is not None
        return any(event["event"] == "begins" and event["step"] == self._job.step for event in events)

    def _wait(self, done: Callable[[], object], seconds: float) -> bool:
        """Watch the ranks until a condition is true; return whether that happened in time."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, process in enumerate(self._ranks):
                if self._ended[rank] is None and process.exitcode is not None:
                    self._ended[rank] = time.monotonic()
            if done():
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)

    def _stack(self, rank: int) -> str:
        _signal(self._ranks[rank], signal.SIGCONT)
        _signal(self._ranks[rank], signal.SIGUSR1)
        time.sleep(2.0)
        return (self._folder / f"stacks-{rank}").read_text()

    def _unreadable(self) -> Iterator[str]:
        """Yield the problem of every checkpoint that cannot be read as it was written."""
        import torch  # noqa: PLC0415 - not before the fork server starts

        for path in self._folder.glob("checkpoint-*.pt"):
            try:
                torch.load(path, weights_only=True)
            except Exception as error:  # noqa: BLE001 - any error is a problem
                yield f"{path.name}: {error}"


def _time_of(events: list[dict[str, Any]], name: str) -> float | None:
    return next((event["time"] for event in events if event["event"] == name), None)


def _signal(process: BaseProcess, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        assert process.pid is not None
        os.kill(process.pid, number)


def _session(leader: int | None) -> list[int]:
    """Return the processes of a rank's session: the rank and everything that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


def _end(process: BaseProcess) -> None:
    process.kill()
    process.join()


def _wait_until(done: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("the store did not start")
        time.sleep(_LOOK_SECONDS)
