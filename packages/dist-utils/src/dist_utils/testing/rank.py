"""What runs in the process of one rank, and what it reports to its caller."""

from __future__ import annotations

import atexit
import contextlib
import enum
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from dist_utils.process_groups import error_text

if sys.platform == "linux":
    import fcntl


class Stage(enum.Enum):
    """How far a rank has got. At the first two it waits for the others."""

    READY = "its process has started"
    RETURNED = "its function has returned"
    ENDED = "its process has ended"
    STOPPED = "it has stopped itself, and will never end"
    FAILED = "it has raised"


class Failure(NamedTuple):
    """What a rank raised, and when."""

    when: float
    error: bytes  # pickled
    traceback: str


_connection: Connection | None = None
"""In the process of a rank: where it reports to, each time a :class:`Stage` and its content."""


def run_rank(
    connection: Connection,
    files: Sequence[Connection],
    environment: dict[str, str],
    start_method: str,
    backend: str | None,
    group_timeout: float,
    call: bytes,
) -> None:
    """Call a function as one rank: the entry point of a new process.

    Args:
        connection: For reports, and for the answers to those of the first two stages.
        files: Where standard output and error go, and where the stacks are written at SIGUSR1 and at a crash.
        environment: All of it, the rank included.
        start_method: How multiprocessing starts processes in the caller. Here it would take a server, as for
            the ranks themselves: another one for each rank, which imports torch again.
        backend: As for :func:`run_ranks`.
        group_timeout: Seconds.
        call: The function and its arguments besides the rank, pickled.
    """
    global _connection  # noqa: PLW0603 - one process, one rank
    _connection = connection
    *outputs, stacks = files
    for descriptor, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    faulthandler.enable(stacks.fileno())
    os.environ.clear()  # that of the server's start
    os.environ.update(environment)
    multiprocessing.set_start_method(start_method, force=True)
    rank = int(environment["RANK"])
    try:
        _take_up_environment()
        fn, args = pickle.loads(call)  # noqa: S301 - the caller's
        # A process may start later than the others by more than a collective may take.
        _meet(connection, Stage.READY)
        _end_with_caller()
        _join_group(rank, backend, group_timeout)
        result = fn(rank, *args)
        # With Gloo a rank can leave a collective, even a barrier, before another rank has entered it. That
        # rank fails if the connection is closed by then; and nobody can count the bytes sent on a closed one.
        _meet(connection, Stage.RETURNED, _pickle(result))
    except BaseException as error:  # noqa: BLE001 - the caller raises it; pytest's are no Exception
        failure = _failure(error)
        with contextlib.suppress(Exception):  # closed, for one
            sys.stdout.flush()
        connection.send((Stage.FAILED, failure))
        # No clean-up: it could wait for a peer, and closed connections tell the peers at once.
        os._exit(1)
    atexit._run_exitfuncs()  # noqa: SLF001 - coverage's, for one
    # Now multiprocessing waits for threads, flushes the outputs and calls os._exit. The interpreter's
    # teardown would abort about one rank in a hundred: where a Gloo thread still drops a callback's objects.


def stop_process() -> None:
    """Stop this rank's process where it is, with its connections open, for tests of a peer that hangs.

    Its peers notice only at their timeout. :func:`run_ranks` ends it when all other ranks have ended; it must
    be one of the ranks in ``may_die``.

    Raises:
        RuntimeError: The process is not a rank of :func:`run_ranks`: nothing would end it.

    Example:
        >>> def peer_hangs(rank):  # doctest: +SKIP
        ...     if rank == 1:
        ...         stop_process()
        ...     with pytest.raises(RuntimeError):
        ...         dist.all_reduce(torch.ones(1))
        >>> run_ranks(peer_hangs, 2, may_die={1}, group_timeout=patience(2.0))  # doctest: +SKIP
    """
    if _connection is None:
        raise RuntimeError("stop_process() is for a rank of run_ranks, which ends it")
    _connection.send((Stage.STOPPED, None))
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.1)  # the signal may reach another thread first, and this one must not go on meanwhile


def _meet(connection: Connection, stage: Stage, content: bytes | None = None) -> None:
    """Report a stage, and wait until all others have reached it, too."""
    connection.send((stage, content))
    connection.recv()


def _end_with_caller() -> None:
    """Have the system kill this process when the caller ends, or the last fork of it.

    It needs no thread, so it also ends a process that hangs with the GIL, or that is stopped. Does nothing
    except on Linux: ``F_SETSIG``, which chooses the signal, exists only there.
    """
    caller = multiprocessing.parent_process()
    if sys.platform != "linux" or caller is None:
        return
    # A pipe, which ends with the caller. Nothing is written into it any more: the caller has answered.
    pipe = caller.sentinel
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    if wait([pipe], timeout=0):  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _take_up_environment() -> None:
    """Do again what imports in the server have done once for all ranks: read a variable, and draw a seed."""
    dist.set_debug_level_from_env()  # type: ignore[attr-defined] # public
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _join_group(rank: int, backend: str | None, group_timeout: float) -> None:
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if backend is None:
        return
    if backend == "nccl":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(backend, timeout=timedelta(seconds=group_timeout))
    if backend == "gloo":
        # A rank that has connected to all could end before they have connected to it: an error there.
        dist.barrier()


def _pickle(value: Any) -> bytes:
    """Return a value as bytes from which it can be made again; raises what pickle does with others."""
    pickled = pickle.dumps(value)
    pickle.loads(pickled)  # noqa: S301 - from this process
    return pickled


def _let_outcomes_pickle() -> None:
    """Let pickle find what ``pytest.skip`` and ``pytest.fail`` raise: their classes claim to be built in."""
    if (pytest := sys.modules.get("pytest")) is not None:
        for outcome in (pytest.skip, pytest.fail):
            outcome.Exception.__module__ = "_pytest.outcomes"


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    _let_outcomes_pickle()
    try:
        pickled = _pickle(error)
    except BaseException:  # noqa: BLE001 - a class may refuse in any way
        pickled = _pickle(RuntimeError(error_text(error)))
    return Failure(time.time(), pickled, text)
