"""Start ranks as real processes, wait for them, and raise what they raised."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, not in its __all__

from dist_utils.testing.ending import let_ranks_end_with_this_process
from dist_utils.testing.rank import Outputs, Ranks
from dist_utils.testing.starting import start_method
from dist_utils.testing.waiting import MOST_PATIENCE, patience

__all__ = ["RankDied", "RankTraceback", "RanksHung", "nccl_can_run", "run_ranks"]


_LOOK_SECONDS = 0.2
"""How often to check for ranks that have stopped themselves; nothing else reports them."""

_SETTLE_SECONDS = 1.0
"""How long the other ranks get to fail too once one has failed."""


class RankTraceback(Exception):  # noqa: N818 - the cause of an error, not an error to catch
    """The tracebacks of the ranks that failed, as text. The cause of what :func:`run_ranks` raises."""


class RankDied(RuntimeError):  # noqa: N818 - says what happened
    """A rank's process ended without a result: killed by a signal, or by ``os._exit``."""


class RanksHung(TimeoutError):  # noqa: N818 - says what happened
    """Some ranks did not finish in time. The message names them and shows where each one hung."""


def nccl_can_run(world_size: int) -> bool:
    """Return whether there are enough GPUs for NCCL: one for each rank, or a single one if it may be shared.

    Ranks may share a GPU with NCCL 2.30 and newer if ``NCCL_MULTI_RANK_GPU_ENABLE=1`` is set, NCCL's own
    variable. That is for tests on a machine with a single GPU; it makes nothing faster.
    """
    gpus = torch.cuda.device_count()
    return gpus >= world_size or (gpus > 0 and os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1")


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
        backend: The backend of the default process group, which exists when ``fn`` is called. With ``"nccl"``
            rank r uses GPU r (where ranks may share GPUs: r modulo their number, see :func:`nccl_can_run`).
            ``None``: no process group.
        timeout: Seconds until every process is killed; more where other work keeps the machine busy
            (:func:`patience`), because a rank that waits for a core does not hang.
        group_timeout: Seconds that a collective may take. By default as long as the ranks may run: no
            collective gives up before they are killed. The group is made when every process has started.
        may_die: Ranks that may end without a result, for tests of a dying peer (``os._exit``) or of one that
            hangs (:func:`stop_process`): their result is ``None``.

    Returns:
        The results in rank order. They must pickle.

    Raises:
        ValueError: ``world_size`` is less than 1, or NCCL needs more GPUs for it.
        RanksHung: A rank did not finish in time. The stacks of its threads are in the message (on
            systems with signals).
        RankDied: A rank's process ended without a result. The message has its exit code or signal.
        BaseException: What ``fn`` raised first, of the same type. Its ``__cause__`` is a
            :class:`RankTraceback` with the tracebacks of all ranks that failed until then.

    Processes that ``fn`` itself starts are not killed with it. On Linux the ranks are killed if the caller's
    process ends, even by a signal. A rank that has returned keeps its connections until all have, or for two
    seconds (longer on a busy machine): a peer's last collective still succeeds.

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
    if backend == "nccl" and not nccl_can_run(world_size):
        raise ValueError(f"nccl needs a GPU per rank: {world_size} ranks, {torch.cuda.device_count()} GPUs")
    outputs = Outputs()
    with tempfile.TemporaryDirectory(prefix="run_ranks_") as folder:
        # Kept by this process, which outlives every rank; on a port that the system picks.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        longest = MOST_PATIENCE * timeout
        ranks = Ranks(
            fn,
            args,
            world_size,
            backend,
            start_timeout=longest,
            group_timeout=longest if group_timeout is None else group_timeout,
            port=store.port,
            folder=Path(folder),
            environment=dict(os.environ),
            outputs=outputs,
        )
        with let_ranks_end_with_this_process(ranks.caller):
            context = mp.start_processes(  # type: ignore[attr-defined,no-untyped-call]
                ranks, nprocs=world_size, join=False, start_method=start_method()
            )
            processes: list[BaseProcess] = context.processes
            try:
                _wait(processes, ranks, timeout, may_die)
            finally:
                for process in processes:
                    process.kill()
                    process.join()
        return [ranks.result(index) for index in range(world_size)]


def _wait(processes: Sequence[BaseProcess], ranks: Ranks, timeout: float, may_die: Collection[int]) -> None:
    """Return when every process has ended well; raise as soon as one has not, or at the timeout.

    Ranks in ``may_die`` may also end in any other way, or stop.
    """
    began, seconds = time.monotonic(), timeout
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running:
        if all(rank in may_die and ranks.stopped(rank) for rank in running.values()):
            return
        left = began + seconds - time.monotonic()
        ended = wait_for_any(list(running), timeout=max(0.0, min(left, _LOOK_SECONDS)))
        if not ended and left > 0:
            continue
        if not ended and seconds == timeout and (seconds := patience(timeout)) > timeout:
            continue
        if not ended:
            hung = [rank for rank in running.values() if not ranks.waits(rank)] or list(running.values())
            stacks = [
                f"rank {rank} hung here:\n{ranks.stack(rank, processes[rank].pid or 0)}" for rank in hung
            ]
            raise RanksHung(
                f"ranks {hung} of {len(processes)} did not finish within {seconds:g} s\n" + "\n".join(stacks)
            )
        for rank in [running.pop(sentinel) for sentinel in list(running) if sentinel in ended]:
            ranks.note_end(rank)
            if rank not in may_die and not _ended_well(processes[rank], ranks, rank):
                # The others may be about to fail for the same reason, or be the reason.
                settled = time.monotonic() + _SETTLE_SECONDS
                while running and (seconds := settled - time.monotonic()) > 0:
                    for other in wait_for_any(list(running), timeout=seconds):
                        running = {sentinel: r for sentinel, r in running.items() if sentinel != other}
                raise _first_failure(processes, ranks, may_die)


def _ended_well(process: BaseProcess, ranks: Ranks, rank: int) -> bool:
    process.join()  # its sentinel is ready a moment before its exit code
    return process.exitcode == 0 and ranks.succeeded(rank)


def _first_failure(processes: Sequence[BaseProcess], ranks: Ranks, may_die: Collection[int]) -> BaseException:
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
