"""Run a function on several ranks, as real processes with a real process group, and see what they did.

Made for tests of code that communicates: the results of all ranks come back, an error comes back with
its traceback, and a hang ends at a timeout with the place where each rank hung.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import math
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import reduction
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, not in its __all__
from torch.nn.parallel import DistributedDataParallel

from dist_utils import torch_compat

__all__ = ["RankDied", "RankTraceback", "RanksHung", "grad_bucket", "patience", "run_ranks", "tcp_bytes_sent"]

_STACK_SECONDS = 2.0
"""How long a hung rank gets to write down its stack before it is killed."""
_SAMPLE_SECONDS = 0.05
"""How long ``patience`` computes: several turns of the scheduler."""
_SETTLE_SECONDS = 1.0
"""How long the other ranks get to fail too once one has failed."""

# struct tcp_info of linux/tcp.h: tcpi_bytes_sent and, right behind it, tcpi_bytes_retrans.
_TCP_INFO_BYTES_SENT = 200
_TCP_INFO_BYTES = _TCP_INFO_BYTES_SENT + 16


class RankTraceback(Exception):  # noqa: N818 - the cause of an error, not an error to catch
    """The tracebacks of the ranks that failed, as text. The cause of what :func:`run_ranks` raises."""


class RankDied(RuntimeError):  # noqa: N818 - says what happened
    """A rank's process ended without a result: killed by a signal, or by ``os._exit``."""


class RanksHung(TimeoutError):  # noqa: N818 - says what happened
    """Some ranks did not finish in time. The message names them and shows where each one hung."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str | None = "gloo",
    timeout: float = 60.0,
    group_timeout: float | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(rank, *args)`` in ``world_size`` new processes and return what each rank returned.

    The processes are started with ``torch.multiprocessing``, find each other through a store that the
    caller's process keeps (so that rank 0 may die), and have ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` set. torch uses one CPU thread per rank
    unless ``OMP_NUM_THREADS`` says otherwise. What they print goes to where the caller's file descriptors 1
    and 2 lead during this call (pytest's ``capfd``, not ``capsys``).

    Args:
        fn: A function that the new process can import: defined at the top level of a module.
        world_size: Number of ranks, at least 1.
        *args: Passed on to ``fn``; must pickle.
        backend: Of the default process group, which is there when ``fn`` is called. With ``"nccl"``
            rank r uses GPU r. ``None``: no process group.
        timeout: Seconds until every process is killed; more where other work keeps the machine busy
            (:func:`patience`), for a rank that waits for a core does not hang.
        group_timeout: Seconds that a collective may take; ``timeout`` if not given.
        may_die: Ranks that may end without a result, for tests of a dying peer: their result is ``None``.

    Returns:
        The results in rank order. They must pickle.

    Raises:
        ValueError: ``world_size`` is less than 1, or there are fewer GPUs than ranks.
        RanksHung: A rank did not finish in time. The stacks of its threads are in the message (on
            systems with signals).
        RankDied: A rank's process ended without a result. The message has its exit code or signal.
        BaseException: What ``fn`` raised first, of the same type. Its ``__cause__`` is a
            :class:`RankTraceback` with the tracebacks of all ranks that failed until then.

    Processes that ``fn`` itself starts are not killed with it.

    Cost:
        Half a second, and the imports of ``fn``'s module in every process; torch, with what DDP models need
        of its compiler, is imported once, by the first call (some seconds), in a server that lives as long
        as the caller's process. Where there is no ``fork``, as on Windows, every process imports it. Group
        small checks into one call.

    Example:
        >>> def total(rank, start):  # doctest: +SKIP
        ...     value = torch.tensor(start + rank)
        ...     dist.all_reduce(value)
        ...     return value.item()
        >>> run_ranks(total, 2, 10)  # doctest: +SKIP
        [21, 21]
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    if backend == "nccl" and torch.cuda.device_count() < world_size:
        raise ValueError(f"nccl needs a GPU per rank: {world_size} ranks, {torch.cuda.device_count()} GPUs")
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        # Kept by this process, which outlives every rank; on a port that the system picks.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timeout if group_timeout is None else group_timeout
        ranks = _Ranks(
            fn, args, world_size, backend, limit, store.port, Path(folder), dict(os.environ), _Outputs()
        )
        context = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
            ranks, nprocs=world_size, join=False, start_method=_start_method()
        )
        processes: list[BaseProcess] = context.processes
        try:
            _wait(processes, ranks, timeout, may_die)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [ranks.result(index) for index in range(world_size)]


def _start_method() -> str:
    """Return how ranks are started: by a server that has imported torch, where the system has that.

    It forks itself before anything has run in it, so ranks are as fresh as spawned ones.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.get_context("forkserver").set_forkserver_preload(["dist_utils.rank_server"])
    return "forkserver"


class _Outputs:
    """Where the caller's standard output and error lead now: pickled to a rank, it writes there too.

    Without it a rank of the server would write to where they led when the server was started.
    """

    def __init__(self, handed_over: Sequence[Any] = ()) -> None:
        self._handed_over = handed_over

    def __reduce__(self) -> tuple[Any, ...]:
        """Hand the descriptors over; a spawned process has them already."""
        if _start_method() != "forkserver":
            return _Outputs, ()
        return _Outputs, ([_handed_over(descriptor) for descriptor in _OUTPUTS],)

    def take(self) -> None:
        """Write to them from now on."""
        for descriptor, given in zip(_OUTPUTS, self._handed_over, strict=False):
            if given is not None:
                inherited = given.detach()
                os.dup2(inherited, descriptor)
                os.close(inherited)


_OUTPUTS = (1, 2)


def _handed_over(descriptor: int) -> Any:
    try:
        os.fstat(descriptor)
    except OSError:  # closed
        return None
    return reduction.DupFd(descriptor)


class _Failure(NamedTuple):
    when: float
    error: BaseException
    text: str


@dataclass(frozen=True)
class _Ranks:
    """What every rank runs, and the files by which it tells its parent how that went."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    backend: str | None
    group_timeout: float
    port: int
    folder: Path
    environment: dict[str, str]
    outputs: _Outputs

    def __call__(self, rank: int) -> None:
        """Be rank ``rank``; the entry point of a new process."""
        self.outputs.take()
        os.environ.clear()  # the server's, as it was when that started
        os.environ.update(self.environment)
        if hasattr(faulthandler, "register"):
            faulthandler.register(signal.SIGUSR1, file=self._path("stack", rank).open("w"))
        try:
            self._start(rank)
            result = self.fn(rank, *self.args)
            torch.save(result, self._path("result", rank))
            # A DDP model is a cycle, and keeps its group.
            gc.collect()
            if torch_compat.GROUPS_END_WITHOUT_GIL:
                _end_all_groups()
            # As the interpreter does at its end: a leaked thread is a hang here as it would be there.
            threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001
        except BaseException as error:  # noqa: BLE001 - raised again by the parent; pytest's are no Exception
            failure = _Failure(time.time(), _picklable(error), traceback.format_exc())
            unfinished = self._path("unfinished", rank)
            unfinished.write_bytes(pickle.dumps(failure))
            unfinished.replace(self._path("failure", rank))  # whole, or not there
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
        # With the last of them, init_process_group("gloo") in fn uses the store that there is.
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self.port), TORCHELASTIC_USE_AGENT_STORE="True"
        )
        if self.backend is None:
            return
        if self.backend == "nccl":
            torch.cuda.set_device(rank)
        limit = timedelta(seconds=self.group_timeout)
        store = TCPStore("127.0.0.1", self.port, is_master=False, timeout=limit)
        dist.init_process_group(
            self.backend, store=store, rank=rank, world_size=self.world_size, timeout=limit
        )

    def result(self, rank: int) -> Any:
        path = self._path("result", rank)
        return torch.load(path, weights_only=False) if path.exists() else None

    def succeeded(self, rank: int) -> bool:
        return self._path("result", rank).exists() and not self._path("failure", rank).exists()

    def failure(self, rank: int) -> _Failure | None:
        path = self._path("failure", rank)
        return _Failure(*pickle.loads(path.read_bytes())) if path.exists() else None  # noqa: S301 - our own file

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


def _end_all_groups() -> None:
    if dist.is_initialized():
        try:
            dist.destroy_process_group()
        except KeyError:  # another thread has ended its own group while torch went through the list of all
            dist.destroy_process_group()


def _flush_and_exit(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _picklable(error: BaseException) -> BaseException:
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), BaseException):  # noqa: S301 - our own bytes
            return error
    except Exception:  # noqa: BLE001, S110 - an exception class may refuse in any way
        pass
    try:
        return RuntimeError(f"{type(error).__name__}: {error}")
    except Exception:  # noqa: BLE001 - also to be shown
        return RuntimeError(f"{type(error).__name__}, which cannot be shown")


def _wait(processes: Sequence[BaseProcess], ranks: _Ranks, timeout: float, may_die: Collection[int]) -> None:
    """Return when every process has ended well; raise as soon as one has not, or at the timeout."""
    began, seconds = time.monotonic(), timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        ended = wait_for_any(list(running), timeout=max(0.0, began + seconds - time.monotonic()))
        if not ended and seconds == timeout and (seconds := patience(timeout)) > timeout:
            continue
        if not ended:
            hung = list(running.values())
            stacks = [
                f"rank {rank} hung here:\n{ranks.stack(rank, processes[rank].pid or 0)}" for rank in hung
            ]
            raise RanksHung(
                f"ranks {hung} of {len(processes)} did not finish within {seconds:.3g} s\n"
                + "\n".join(stacks)
            )
        for rank in [running.pop(sentinel) for sentinel in list(running) if sentinel in ended]:
            if rank not in may_die and not _ended_well(processes[rank], ranks, rank):
                # The others may be about to fail for the same reason, or be the reason.
                settled = time.monotonic() + _SETTLE_SECONDS
                while running and (seconds := settled - time.monotonic()) > 0:
                    for other in wait_for_any(list(running), timeout=seconds):
                        running = {sentinel: r for sentinel, r in running.items() if sentinel != other}
                raise _first_failure(processes, ranks, may_die)


def _ended_well(process: BaseProcess, ranks: _Ranks, rank: int) -> bool:
    process.join()  # its sentinel is ready a moment before its exit code
    return process.exitcode == 0 and ranks.succeeded(rank)


def _first_failure(
    processes: Sequence[BaseProcess], ranks: _Ranks, may_die: Collection[int]
) -> BaseException:
    """Make the error to raise: a rank that died explains the others' errors, else the earliest counts."""
    failures = {
        rank: failure for rank in range(len(processes)) if (failure := ranks.failure(rank)) is not None
    }
    cause = RankTraceback(
        "\n".join(f"\nrank {rank} raised:\n{failure.text}" for rank, failure in failures.items())
    )
    for rank, process in enumerate(processes):
        gone = process.exitcode is not None and rank not in failures
        if gone and rank not in may_die and not _ended_well(process, ranks, rank):
            code = process.exitcode or 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            when = "died after it had returned" if ranks.succeeded(rank) else "ended without a result"
            death = RankDied(f"rank {rank} of {len(processes)} {when}: {how}")
            death.__cause__ = cause if failures else None
            return death
    first = min(failures.values(), key=lambda failure: failure.when)
    first.error.__cause__ = cause
    return first.error


class _Gradients(torch.nn.Module):
    """Parameters that get the given gradients."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.values = torch.nn.ParameterList(torch.zeros_like(gradient) for gradient in gradients)
        self.gradients = gradients

    def forward(self) -> torch.Tensor:
        products = [
            value * given for value, given in zip(self.values.parameters(), self.gradients, strict=True)
        ]
        return torch.stack([product.sum() for product in products]).sum()


def grad_bucket(gradients: Sequence[torch.Tensor]) -> torch_compat.GradBucket:
    """Return a bucket as ``DistributedDataParallel`` hands it to a communication hook.

    For tests and benchmarks of hooks; buckets cannot be made otherwise. ``set_buffer`` puts other values
    into it.

    Args:
        gradients: What is in the bucket: one parameter for each, in this order. Dense, of one dtype.

    Cost:
        Collective: makes a DDP model on all ranks and runs one backward pass.
    """
    size = sum(gradient.nbytes for gradient in gradients)
    ddp = DistributedDataParallel(
        _Gradients(gradients), bucket_cap_mb=max(25, size / 2**19), gradient_as_bucket_view=True
    )
    buckets: list[torch_compat.GradBucket] = []

    def capture(_: object, bucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[no-untyped-def] # noqa: ANN001
        buckets.append(bucket)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    capture.__annotations__.clear()  # strings here, which register_comm_hook refuses
    ddp.register_comm_hook(None, capture)
    ddp().backward()
    (bucket,) = buckets
    return bucket


def patience(seconds: float) -> float:
    """Return how long to wait now for what takes less than ``seconds`` on a machine without other work.

    ``seconds``, times how many processes want each core: by the system's count of the last minute, or as the
    caller sees it when it computes for a moment, whichever is more. For timeouts that a test waits out, which
    should be short, and must not end a collective only because a rank had to wait for a core.

    Args:
        seconds: The time without other work.

    Returns:
        ``seconds`` on an idle machine; at most 30 times as many. To a tenth of a second, upwards.

    Cost:
        A twentieth of a second.

    Example:
        >>> run_ranks(peer_stops, 3, may_die={1}, group_timeout=patience(2.0))  # doctest: +SKIP
    """
    began, computed = time.perf_counter(), time.thread_time()
    while (passed := time.perf_counter() - began) < _SAMPLE_SECONDS:
        pass
    computed = time.thread_time() - computed
    load = os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else 1.0
    factor = min(max(load, passed / max(computed, 1e-3), 1.0), 30.0)
    return math.ceil(10 * seconds * factor) / 10


def tcp_bytes_sent() -> int:
    """Return how many bytes of payload this process has sent on the TCP connections it has open now.

    The difference of two calls is what was sent between them: what a hook really puts on the wire with
    Gloo, whatever its formula says. Retransmissions do not count. Only on Linux, whose kernel counts;
    traffic over NVLink, shared memory or InfiniBand is not TCP.

    Raises:
        NotImplementedError: This is not Linux.
    """
    if sys.platform != "linux":
        raise NotImplementedError("counting sent bytes needs Linux")
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        # The listing's own descriptor is gone by now, and files and pipes are no sockets.
        with contextlib.suppress(OSError):
            connection = socket.socket(fileno=int(path.name))
            try:
                if connection.type == socket.SOCK_STREAM and connection.family != socket.AF_UNIX:
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                    sent, retransmitted = struct.unpack_from("=QQ", info, _TCP_INFO_BYTES_SENT)
                    total += sent - retransmitted
            finally:
                connection.detach()  # it belongs to Gloo
    return total
