"""One rank of a job: train, record the parameters after each step, and how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from soak import trouble
from soak.faults import EVERY, Job
from soak.records import Record, digests, resources
from soak.trainings import TRAININGS, Training

__all__ = ["Place", "be_rank", "keep_store"]

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1


class Place:
    """Where a process runs: on an emulated host or on this machine.

    Args:
        holder: A process of the emulated host; 0 for this machine.
        store: Address and port of the store.
        interface: The name of its network interface.
    """

    def __init__(self, holder: int, store: tuple[str, int], interface: str) -> None:
        self.holder, self.store, self.interface = holder, store, interface

    def enter(self) -> None:
        """Move this process, which has only one thread yet, there; it ends with the server that made it."""
        libc = ctypes.CDLL(None, use_errno=True)
        os.setsid()
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.holder:
            kinds = {"user": _CLONE_NEWUSER, "net": _CLONE_NEWNET}
            # Both are opened before the first is entered, because another user may not open the second.
            spaces = [
                (kind, os.open(f"/proc/{self.holder}/ns/{name}", os.O_RDONLY))
                for name, kind in kinds.items()
                if not Path(f"/proc/{self.holder}/ns/{name}").samefile(f"/proc/self/ns/{name}")
            ]
            for kind, descriptor in spaces:
                if libc.setns(descriptor, kind):
                    raise OSError(ctypes.get_errno(), "setns")
                os.close(descriptor)
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"


def keep_store(place: Place, ready: Path) -> None:
    """Keep the store of a job until this process is killed."""
    place.enter()
    store = dist.TCPStore("0.0.0.0", place.store[1], is_master=True, wait_for_workers=False)
    ready.touch()
    signal.pause()
    del store


def be_rank(job: Job, rank: int, place: Place, folder: Path) -> None:
    """Train, and exit like a program whose ``finally`` closes what it has started."""
    place.enter()
    torch.set_num_threads(1)
    with (folder / f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        record = Record(folder / f"record-{rank}")
        _settle_in()
        before = resources()
        training = None
        try:
            _join(job, rank, place)
            training = TRAININGS[job.training].begin()
            _arm(job, rank, folder, record)
            _train(job, training, folder, record)
        except BaseException as error:  # noqa: BLE001 - any error is an outcome
            text = str(error).splitlines()
            record.note("raised", type=type(error).__name__, text=" ".join(text)[:600])
        finally:
            _leave(training, record)
            del training
            after = resources()
            record.note("left", before=before, after=after, open=_open_sockets())
        os._exit(0)


def _settle_in() -> None:
    """Load everything that is loaded at first use, so that its descriptors do not count as leaks."""
    torch.ones(2).add_(1)
    gc.collect()


def _join(job: Job, rank: int, place: Place) -> None:
    address, port = place.store
    limit = timedelta(seconds=job.timeout)
    keeps = job.store == "rank 0" and rank == 0
    store = dist.TCPStore(
        address, port, is_master=keeps, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)


def _arm(job: Job, rank: int, folder: Path, record: Record) -> None:
    if not job.fault or rank != job.victim:
        return
    fault = job.kind

    def now(action: object) -> None:
        record.note("injected")
        action()  # type: ignore[operator]

    actions = {
        "no more memory: an allocation fails": trouble.no_more_memory,
        "no more memory: killed by the system": functools.partial(_wait_for_limit, folder),
        "disk full in a checkpoint": functools.partial(_fill_disk, folder, rank),
        "clock an hour forwards": functools.partial(trouble.jump, 3600),
        "clock an hour back": functools.partial(trouble.jump, -3600),
    }
    action = trouble.raise_here if fault.name.startswith("raises") else actions.get(fault.name)
    if action is not None:
        trouble.arm(fault.where, job.step, functools.partial(now, action))


def _fill_disk(folder: Path, rank: int) -> None:
    """Let writes to the next checkpoint fail with a full device."""
    (folder / f"checkpoint-{rank}.new").symlink_to("/dev/full")


def _wait_for_limit(folder: Path) -> None:
    """Allocate memory once a limit is set."""
    while not (folder / "limited").exists():
        time.sleep(0.001)
    trouble.swell()


def _train(job: Job, training: Training, folder: Path, record: Record) -> None:
    record.note("ready", parameters=digests(training.parameters()))
    for step in range(job.steps):
        record.note("begins", step=step)
        training.step(step)
        record.note("stepped", step=step, parameters=digests(training.parameters()))
        if (step + 1) % EVERY == 0:
            training.save(folder, step + 1)
            record.note("saved", step=step)
    dist.barrier()  # lets Gloo's threads finish
    record.note("finished")


def _leave(training: Training | None, record: Record) -> None:
    began = time.monotonic()
    problem = ""
    held = [] if training is None else list(training.parameters())
    if training is not None:
        try:
            training.close()
        except Exception as error:  # noqa: BLE001 - an outcome
            problem = f"{type(error).__name__}: {error}"
    if held:  # nothing steps from here on
        record.note("kept", parameters=digests(held))
        held.clear()
    gc.collect()
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - an outcome
        problem = f"{type(error).__name__}: {error}"
    gc.collect()
    record.note("closed", seconds=time.monotonic() - began, problem=problem)


def _open_sockets() -> list[str]:
    found = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(str(path.readlink()))
    return sorted(found)
