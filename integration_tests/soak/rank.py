"""One rank of a job: train, record the parameters after each step, and how it ended."""

import ctypes
import faulthandler
import functools
import gc
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from trainings import TRAININGS, Places, Training

from dist_utils import resolve_group
from soak.faults import EVERY, Job
from soak.records import Record, digests, resources

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1


class Place(NamedTuple):
    """Where a process runs: on an emulated host or on this machine.

    Attributes:
        holder: A process of the emulated host; 0 for this machine.
        store: Address and port of the store.
        interface: The name of its network interface.
    """

    holder: int
    store: tuple[str, int]
    interface: str

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


def keep_store(place: Place) -> None:
    """Keep the store of a job until this process is killed."""
    place.enter()
    store = dist.TCPStore("0.0.0.0", place.store[1], is_master=True, wait_for_workers=False)
    signal.pause()
    del store


def be_rank(job: Job, rank: int, place: Place, folder: Path) -> None:
    """Train, and exit like a program whose ``finally`` closes what it has started."""
    place.enter()
    torch.set_num_threads(1)
    with (folder / f"stacks-{rank}").open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        record = Record(folder / f"record-{rank}")
        torch.ones(2).add_(1)  # loads what is loaded at first use, whose descriptors would count as leaks
        gc.collect()
        before = resources()
        training = None
        try:
            _join(job, rank, place)
            places = Places()
            training = TRAININGS[job.training].begin(resolve_group(), places)
            if job.fault and job.kind.place and rank == job.victim:
                places.arm(job.kind.place, job.step, functools.partial(_inject, job, folder, record))
            _train(job, training, folder, record)
        except BaseException as error:  # noqa: BLE001 - any error is an outcome
            text = str(error).splitlines()
            record.note("raised", type=type(error).__name__, text=" ".join(text)[:600])
        finally:
            _leave(training, record)
            del training
            seconds = 0.0 if TRAININGS[job.training].torch_keeps_groups else 3 * job.timeout
            record.note("left", before=before, after=_settled(before, seconds))
        os._exit(0)


def _settled(before: dict[str, int], seconds: float) -> dict[str, int]:
    """Return what this process uses when nothing more than before is left open, or after so long.

    Gloo gives up a group that was not connected in time by itself, on a thread of its own, a little later;
    torch likewise a connection to a store that is gone.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        after = resources()
        if all(after[what] <= before[what] for what in ("sockets", "threads")):
            return after
        time.sleep(0.1)
    return resources()


def _join(job: Job, rank: int, place: Place) -> None:
    address, port = place.store
    limit = timedelta(seconds=job.timeout)
    keeps = job.store == "rank 0" and rank == 0
    store = dist.TCPStore(
        address, port, is_master=keeps, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    store.set_timeout(limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.world_size, timeout=limit)


def _inject(job: Job, folder: Path, record: Record) -> None:
    record.note("injected")
    job.kind.action(folder, job.victim)


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
    """Close everything, as a program does in its ``finally``."""
    began = time.monotonic()
    held = [] if training is None else training.parameters()
    problem = ""
    try:
        if training is not None:
            training.close()
            # Nothing steps from here on.
            record.note("kept", parameters=digests(held))
            held.clear()
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001 - an outcome
        problem = f"{type(error).__name__}: {error}"
    gc.collect()
    record.note("closed", seconds=time.monotonic() - began, problem=problem)
