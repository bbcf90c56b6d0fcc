"""What runs in the process of one rank, and the files by which it reports to its parent."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, not in its __all__

from dist_utils import torch_compat
from dist_utils.testing.ending import end_with_caller
from dist_utils.testing.starting import start_method
from dist_utils.testing.stopping import note_stop_in
from dist_utils.testing.waiting import patience

__all__ = ["Failure", "Outputs", "Ranks"]

_STACK_SECONDS = 2.0
"""How long a hung rank gets to write down its stack before it is killed."""

_LEAVE_SECONDS = 2.0
"""How long a rank that has returned keeps its connections for those that have not, on an idle machine."""


class Outputs:
    """The caller's current standard output and error; a rank that unpickles this can write to them, too.

    Without it a rank forked by the server would write to where they led when the server was started. What is
    closed in the caller is ``os.devnull`` in a rank.
    """

    def __init__(self) -> None:
        # Now, before other files are open.
        self._open = [descriptor for descriptor in _OUTPUTS if _is_output(descriptor)]
        self._handed_over: dict[int, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Hand the descriptors over; a spawned process has them already."""
        if start_method() != "forkserver":
            return Outputs, ()
        return _received, ({descriptor: reduction.DupFd(descriptor) for descriptor in self._open},)

    def take(self) -> None:
        """Write to them from now on."""
        if start_method() != "forkserver":
            return
        for descriptor in _OUTPUTS:
            given = self._handed_over.get(descriptor)
            new = os.open(os.devnull, os.O_WRONLY) if given is None else given.detach()
            if new == descriptor:  # it was closed here, too
                os.set_inheritable(descriptor, True)
            else:
                os.dup2(new, descriptor)
                os.close(new)


_OUTPUTS = (1, 2)


def _received(handed_over: dict[int, Any]) -> Outputs:
    outputs = Outputs()
    outputs._handed_over = handed_over  # noqa: SLF001 - made here
    return outputs


def _is_output(descriptor: int) -> bool:
    """Return whether it is open and inheritable.

    The caller's own files are not inheritable; one of them may have got the number of a closed output.
    """
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False


class Failure(NamedTuple):
    """What a rank raised, and when."""

    when: float
    error: BaseException
    text: str


@dataclass(frozen=True)
class Ranks:
    """What every rank runs, and the files by which it reports to its parent."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    start_timeout: float
    group_timeout: float
    port: int
    folder: Path
    environment: dict[str, str]
    outputs: Outputs

    def __call__(self, rank: int) -> None:
        """Run as rank ``rank``; the entry point of a new process."""
        self.outputs.take()
        end_with_caller(self.caller)
        os.environ.clear()  # still that of the server's start
        os.environ.update(self.environment)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=self._path("stack", rank).open("w"))
        note_stop_in(self._path("stopped", rank))
        try:
            self._start(rank)
            result = self.fn(rank, *self.args)
            torch.save(result, self._path("result", rank))
            self._await_others(rank)
            # A DDP model is part of a reference cycle, and keeps its group alive.
            gc.collect()
            if torch_compat.GROUPS_END_WITHOUT_GIL:
                _end_all_groups()
            # As the interpreter does at exit: a leaked thread hangs here as it would there.
            threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
        except BaseException as error:  # noqa: BLE001 - the parent raises it; pytest's are no Exception
            failure = Failure(time.time(), _picklable(error), traceback.format_exc())
            unfinished = self._path("unfinished", rank)
            unfinished.write_bytes(pickle.dumps(failure))
            unfinished.replace(self._path("failure", rank))  # atomically
            # No clean-up: it could wait for a peer, and closed connections tell the peers at once.
            _flush_and_exit(1)
        atexit._run_exitfuncs()  # noqa: SLF001 - coverage's, for one
        # Not through the interpreter's teardown: a Gloo thread that still drops a callback's objects
        # there aborts the process (seen about once in a hundred ranks).
        _flush_and_exit(0)

    def _start(self, rank: int) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        ranks = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.world_size,
        }
        os.environ.update({name: str(value) for name, value in ranks.items()})
        # With the last of them, init_process_group("gloo") in fn uses the existing store.
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), TORCHELASTIC_USE_AGENT_STORE="True"
        )
        if self.backend is None:
            return
        if self.backend == "nccl":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        start = timedelta(seconds=self.start_timeout)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=start)
        # The group's timeout is for collectives: a process may start later than the others by more than that.
        store.set(_started(rank), "")
        store.wait([_started(other) for other in range(self.world_size)])
        limit = timedelta(seconds=self.group_timeout)
        store.set_timeout(limit)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=self.world_size, timeout=limit
        )
        if self.backend == "gloo":
            # A rank that has connected to all could end before they have connected to it: an error there.
            dist.barrier()

    def _await_others(self, rank: int) -> None:
        """Return when every rank has finished, or after a short time.

        With Gloo a rank can leave a collective, even a barrier, before another rank has entered it. That rank
        fails if the connection is closed by then; and it cannot count the bytes sent on a closed connection.
        """
        began, next_look = time.monotonic(), _LEAVE_SECONDS
        waits = self._path("waits", rank)
        waits.touch()
        while not all(map(self._has_finished, range(self.world_size))):
            waited = time.monotonic() - began
            if waited > next_look:
                if waited > patience(_LEAVE_SECONDS):
                    break
                next_look = waited + 1.0  # to look costs processor time, so not in every turn
            time.sleep(0.002)
        waits.unlink()

    def _has_finished(self, rank: int) -> bool:
        kinds = ("result", "failure", "stopped", "ended")
        return any(self._path(kind, rank).exists() for kind in kinds)

    @property
    def caller(self) -> Path:
        """The named pipe that is open as long as the caller lives."""
        return self.folder / "caller"

    def note_end(self, rank: int) -> None:
        """Let the others know that a rank's process has ended; called by the parent."""
        self._path("ended", rank).touch()

    def result(self, rank: int) -> Any:
        """Return what a rank's function returned, ``None`` if it did not return."""
        path = self._path("result", rank)
        return torch.load(path, weights_only=False) if path.exists() else None

    def succeeded(self, rank: int) -> bool:
        """Return whether a rank's function returned, and nothing failed after that."""
        return self._path("result", rank).exists() and not self._path("failure", rank).exists()

    def stopped(self, rank: int) -> bool:
        """Return whether a rank has stopped itself, and will never end."""
        return self._path("stopped", rank).exists()

    def waits(self, rank: int) -> bool:
        """Return whether a rank's function returned, and the rank waits for the others to finish."""
        return self._path("waits", rank).exists()

    def failure(self, rank: int) -> Failure | None:
        """Return what a rank raised, if it did."""
        path = self._path("failure", rank)
        return Failure(*pickle.loads(path.read_bytes())) if path.exists() else None  # noqa: S301 - our own file

    def stack(self, rank: int, pid: int) -> str:
        """Make a hung rank write down where it is."""
        if not hasattr(faulthandler, "register"):
            return "(no stack: this system has no signals)"
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
        path, text = self._path("stack", rank), ""
        deadline = time.monotonic() + patience(_STACK_SECONDS)
        while time.monotonic() < deadline:
            before, text = text, path.read_text() if path.exists() else ""
            if text and text == before:
                return text
            time.sleep(0.05)
        return text or "(no stack: the rank was still starting, or ended just now)"

    def _path(self, kind: str, rank: int) -> Path:
        return self.folder / f"{kind}-{rank}"


def _started(rank: int) -> str:
    return f"dist_utils.testing/started/{rank}"


def _end_all_groups() -> None:
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except KeyError:  # another thread destroyed its group while torch went through the list of groups
            dist.destroy_process_group()


def _flush_and_exit(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed when the server was started
            stream.flush()
    os._exit(code)


def _picklable(error: BaseException) -> BaseException:
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), BaseException):  # noqa: S301 - our own bytes
            return error
    except Exception:  # noqa: BLE001, S110 - an exception class may refuse in any way
        pass
    try:
        return RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - its str() may fail, too
        return RuntimeError(f"{type(error).__name__}, which cannot be shown")
