"""Run a job: start its ranks, inject its fault at its moment, and collect every rank's record."""

import contextlib
import itertools
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
from soak.network import emulated_hosts
from soak.rank import Place, be_rank, keep_store

_LOOK_SECONDS = 0.004
_PORTS = itertools.cycle(range(20_000, 30_000))
"""Not what the system gives to whoever asks for any port: another program might get it first."""
_HUNG_SECONDS = 20.0
"""Far beyond every promised time: a rank that has not ended by then hangs."""


class JobEnd(NamedTuple):
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

    def __init__(self, network: Any) -> None:
        self._network = network
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["dist_utils.testing.server", "soak.rank"])

    def run(self, job: Job, step_seconds: float = 0.05) -> JobEnd:
        """Run a job to its end.

        Args:
            job: The job.
            step_seconds: How long a step takes, to time the fault.
        """
        with tempfile.TemporaryDirectory(prefix="soak_") as name, contextlib.ExitStack() as stack:
            folder = Path(name)
            places = self._places(job)
            if job.store == "apart":
                self._start(stack, keep_store, places[0])
            ranks = [
                self._start(stack, be_rank, job, rank, place, folder) for rank, place in enumerate(places)
            ]
            return Watch(job, ranks, folder, self._network).until_the_end(step_seconds)

    def _start(
        self, stack: contextlib.ExitStack, target: Callable[..., None], *arguments: Any
    ) -> BaseProcess:
        """Start a process that is ended with the job."""
        process: BaseProcess = self._context.Process(target=target, args=arguments)
        process.start()
        stack.callback(process.join)
        stack.callback(process.kill)
        return process

    def _places(self, job: Job) -> list[Place]:
        port = next(filter(_is_free, _PORTS))
        if not (job.fault and job.kind.on_hosts):
            return [Place(0, ("127.0.0.1", port), "lo")] * job.world_size
        store = (emulated_hosts.address(0), port)
        hosts = self._network.hosts[: job.world_size]
        return [Place(emulated_hosts.holder(host), store, "eth0") for host in hosts]


class Watch:
    """Watches the ranks of one job, and injects its fault if that comes from outside.

    Attributes:
        job: The job.
        network: The emulated hosts.
        note: What is worth knowing of the fault.
    """

    def __init__(self, job: Job, ranks: list[BaseProcess], folder: Path, network: Any) -> None:
        self.job, self.network, self.note = job, network, ""
        self._ranks, self._folder = ranks, folder
        self._ended: list[float | None] = [None] * len(ranks)
        self._injected: float | None = None

    def until_the_end(self, step_seconds: float) -> JobEnd:
        """Wait for the fault and the end, and return what is known then."""
        if self.job.fault and not self.job.kind.place:
            self._inject(step_seconds)
        self._wait(self._all_ended, patience(self.job.timeout + _HUNG_SECONDS))
        stacks = {rank: self._stack(rank) for rank, when in enumerate(self._ended) if when is None}
        if self.job.fault and self.job.kind.on_hosts:
            self.network.repair(self.job.victim)
        found = [records.read(self._folder / f"record-{rank}") for rank in range(len(self._ranks))]
        inside = (records.first(found[self.job.victim], "injected") or {}).get("time")
        pids = [process.pid for process in self._ranks]
        memory_limit.remove(pids[self.job.victim])
        return JobEnd(
            found,
            [process.exitcode for process in self._ranks],
            self._injected or inside,
            [when or time.monotonic() for when in self._ended],
            stacks,
            [pid for leader in pids for pid in _session(leader) if pid != leader],
            list(self._unreadable()),
            self.note,
        )

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._ranks[rank].pid, number)

    def let_pass(self) -> None:
        """Let the time pass that the fault lasts, or until all ranks have ended."""
        self._wait(self._all_ended, self.job.length)

    def _inject(self, step_seconds: float) -> None:
        self._wait(lambda: self._has_begun() or self._all_ended(), 120.0)
        if self._has_begun():
            time.sleep(self.job.moment * step_seconds)
            self._injected = time.monotonic()
            self.job.kind.action(self)

    def _has_begun(self) -> bool:
        """Return whether the victim has reached its step."""
        events = records.read(self._folder / f"record-{self.job.victim}")
        return any(event["event"] == "begins" and event["step"] == self.job.step for event in events)

    def _all_ended(self) -> bool:
        return None not in self._ended

    def _wait(self, done: Callable[[], object], seconds: float) -> None:
        """Watch the ranks until a condition is true, or this time is over."""
        deadline = time.monotonic() + seconds
        while True:
            for rank, process in enumerate(self._ranks):
                if self._ended[rank] is None and process.exitcode is not None:
                    self._ended[rank] = time.monotonic()
            if done() or time.monotonic() > deadline:
                return
            time.sleep(_LOOK_SECONDS)

    def _stack(self, rank: int) -> str:
        self.signal(rank, signal.SIGCONT)
        self.signal(rank, signal.SIGUSR1)
        time.sleep(2.0)
        return (self._folder / f"stacks-{rank}").read_text()

    def _unreadable(self) -> Iterator[str]:
        """Yield the problem of every checkpoint that cannot be read as it was written."""
        import torch.distributed.tensor  # noqa: PLC0415 - not before the fork server starts

        for path in self._folder.glob("checkpoint-*.pt"):
            try:
                torch.load(path, weights_only=True)
            except Exception as error:  # noqa: BLE001 - any error is a problem
                yield f"{path.name}: {error}"


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _session(leader: int | None) -> list[int]:
    """Return the processes of a rank's session: the rank and everything that it started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found
