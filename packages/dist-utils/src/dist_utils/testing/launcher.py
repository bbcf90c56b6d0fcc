"""Start ranks as real processes, wait for them, and raise what they raised."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from typing import IO, Any, NoReturn

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, not in its __all__

from dist_utils.process_groups import error_text
from dist_utils.testing.rank import Stage, run_rank

_MOST_PATIENCE = 30.0
"""The largest factor by which ``patience`` extends a timeout."""

_SAMPLE_SECONDS = 0.05
"""How long ``patience`` computes: several turns of the scheduler."""

_SETTLE_SECONDS = 0.5
"""How long the other ranks get to fail too once one has failed; how long a rank gets to write its stack."""


class RankTraceback(Exception):  # noqa: N818 - the cause of an error, not an error to catch
    """The tracebacks of the ranks that failed, as text. The cause of what :func:`run_ranks` raises."""


class RankDied(RuntimeError):  # noqa: N818 - says what happened
    """A rank's process ended without a result: killed by a signal, by ``os._exit`` or by ``sys.exit``."""


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

    The processes find each other through a store that the caller's process keeps (so that rank 0 may die),
    and have ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT`` set. torch uses one CPU thread per rank unless ``OMP_NUM_THREADS`` says otherwise. What
    they print goes to where the caller's file descriptors 1 and 2 lead during this call (``capfd`` of
    pytest, not ``capsys``).

    Args:
        fn: A function that the new process can import: defined at the top level of a module.
        world_size: Number of ranks, at least 1.
        *args: Passed on to ``fn``, as copies of its own to each rank; must pickle, without multiprocessing's
            own rules: no queues and locks.
        backend: The backend of the default process group, which exists when ``fn`` is called. With ``"nccl"``
            rank r uses GPU r (where ranks may share GPUs: r modulo their number, see :func:`nccl_can_run`).
            ``None``: no process group.
        timeout: Seconds until every process is killed; more where other work keeps the machine busy
            (:func:`patience`), because a rank that waits for a core does not hang.
        group_timeout: Seconds that a collective may take. By default as long as the ranks may run: no
            collective gives up before they are killed. The group is made when every process has started.
        may_die: Ranks that may end without a result, for tests of a dying peer (``os._exit``) or of one that
            hangs (:func:`stop_process`): their result is ``None``. What they raise, by ``sys.exit`` too, is
            an error as of any rank.

    Returns:
        The results in rank order. They must pickle.

    Raises:
        TypeError: ``world_size`` or a timeout is no number.
        ValueError: One of them is not positive and finite, or NCCL needs more GPUs.
        RanksHung: A rank did not finish in time. The stacks of its threads are in the message.
        RankDied: A rank's process ended without a result. The message has its exit code or signal and, if it
            crashed (SIGABRT, SIGSEGV and the like), the stacks of its threads.
        BaseException: What ``fn`` raised first, or pickle for what it returned, of the same type. Its
            ``__cause__`` is a :class:`RankTraceback` with the tracebacks of all ranks that failed until then.

    Processes that ``fn`` itself starts are not killed with it. On Linux the ranks are killed if the caller's
    process and its forks end, even by a signal. A rank that has returned keeps its connections until all
    have: a peer's last collective still succeeds. Then it ends, and does not call ``destroy_process_group``.

    Cost:
        Half a second, and the imports of ``fn``'s module in every process; torch, with what DDP models need
        of its compiler, is imported once, by the first call (some seconds), in a server that lives as long
        as the caller's process, and that forks the ranks: not on Windows. Group small checks into one call.

    Example:
        >>> def total(rank, start):  # doctest: +SKIP
        ...     value = torch.tensor(start + rank)
        ...     dist.all_reduce(value)
        ...     return value.item()
        >>> run_ranks(total, 2, 10)  # doctest: +SKIP
        [21, 21]
    """
    _check(world_size, backend, timeout, group_timeout)
    context = multiprocessing.get_context("forkserver")
    start_method = multiprocessing.get_start_method()
    # By pickle's own rules: by those of processes all ranks, and the caller, would share a tensor's memory.
    call = pickle.dumps((fn, args))
    context.set_forkserver_preload(["dist_utils.testing.server"])
    with contextlib.ExitStack() as until_return:
        # Connections, because these hand their descriptors over when they are pickled.
        outputs = [until_return.enter_context(Connection(os.dup(file))) for file in (1, 2)]
        # Kept by this process, which outlives every rank; on a port that the system picks.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # init_process_group uses the store that exists
        }
        if group_timeout is None:
            group_timeout = _MOST_PATIENCE * timeout
        ranks: list[_Rank] = []
        for rank in range(world_size):
            connection, theirs = context.Pipe()
            stacks = until_return.enter_context(tempfile.TemporaryFile("a+"))
            their_stacks = Connection(os.dup(stacks.fileno()))
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = context.Process(
                target=run_rank,
                args=(theirs, [*outputs, their_stacks], own, start_method, backend, group_timeout, call),
            )
            process.start()
            theirs.close()
            their_stacks.close()
            ranks.append(_Rank(rank, process, connection, stacks, may_die=rank in may_die))
            until_return.callback(ranks[-1].end)
        began = time.monotonic()
        for stage in (Stage.READY, Stage.RETURNED, Stage.ENDED):
            _wait(ranks, stage, began, timeout)
            for each in ranks:
                each.let_go_on()
    return [each.result() for each in ranks]


def patience(seconds: float) -> float:
    """Return a timeout, on a machine that may be busy, for what takes less than ``seconds`` on an idle one.

    ``seconds``, times the number of processes that want each core: the system's average of the last minute,
    or what a short computation of the caller shows, whichever is larger. For timeouts that a test waits out:
    they should be short, but must not end a collective only because a rank had to wait for a core.

    Args:
        seconds: The time without other work.

    Returns:
        ``seconds`` on an idle machine; at most 30 times as much. Rounded up to half a second, so that it is
        the same in milliseconds everywhere.

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
    factor = min(max(load, passed / max(computed, 1e-3), 1.0), _MOST_PATIENCE)
    return math.ceil(2 * seconds * factor) / 2


@dataclass
class _Rank:
    """A rank as its caller sees it: its process, and what it has reported."""

    number: int
    process: BaseProcess
    connection: Connection
    stacks: IO[str]
    may_die: bool
    reports: dict[Stage, Any] = field(default_factory=dict)

    def listen(self) -> None:
        """Note what it has reported since the last call, and whether its process has ended."""
        exit_code = self.process.exitcode  # first: if it has ended, there are no reports after these
        try:
            while self.connection.poll():
                stage, content = self.connection.recv()
                self.reports[stage] = content
        except (EOFError, OSError):  # the other end is closed
            self.connection.close()
        if exit_code is not None:
            self.reports[Stage.ENDED] = exit_code

    def has_reached(self, stage: Stage) -> bool:
        """Return whether it has come so far, or will never come."""
        given_up = {Stage.ENDED, Stage.STOPPED} if self.may_die else {Stage.ENDED}
        return not self.reports.keys().isdisjoint({stage} | given_up)

    def let_go_on(self) -> None:
        """Tell it that all have reached the stage at which it waits."""
        with contextlib.suppress(OSError):  # it has ended
            self.connection.send(None)

    @property
    def has_died(self) -> bool:
        """Whether its process has ended in another way than by returning or raising."""
        returned = Stage.RETURNED in self.reports and self.reports.get(Stage.ENDED) == 0
        return Stage.ENDED in self.reports and Stage.FAILED not in self.reports and not returned

    def result(self) -> Any:
        """Return what its function returned, ``None`` if it did not return."""
        returned = self.reports.get(Stage.RETURNED)
        return None if returned is None else _load(returned, f"the result of rank {self.number}")

    def written_stacks(self) -> str:
        """Return the stacks that it has written, when it was asked for them or when it crashed."""
        self.stacks.seek(0)
        return self.stacks.read()

    def end(self) -> None:
        """Kill its process, if it still runs."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def _check(world_size: int, backend: str | None, timeout: float, group_timeout: float | None) -> None:
    numbers = {"world_size": world_size, "timeout": timeout, "group_timeout": group_timeout}
    for name, value in numbers.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be positive and finite, got {value}")
    if backend == "nccl" and not nccl_can_run(world_size):
        raise ValueError(f"nccl needs a GPU per rank: {world_size} ranks, {torch.cuda.device_count()} GPUs")


def _wait(ranks: Sequence[_Rank], stage: Stage, began: float, timeout: float) -> None:
    """Return when all ranks have reached ``stage``; raise when one has failed, or at the timeout."""
    while late := [rank for rank in ranks if not rank.has_reached(stage)]:
        waited = time.monotonic() - began
        if waited > timeout and waited > (limit := patience(timeout)):
            numbers, text = [rank.number for rank in late], _where_they_hang(late)
            raise RanksHung(f"ranks {numbers} of {len(ranks)} did not finish within {limit:g} s\n{text}")
        sources = [rank.process.sentinel for rank in late]
        connections = [rank.connection for rank in late if not rank.connection.closed]
        wait_for_any([*sources, *connections], timeout=max(timeout - waited, 1.0))
        for rank in late:
            rank.listen()
        if any((rank.has_died and not rank.may_die) or Stage.FAILED in rank.reports for rank in late):
            _raise_first_failure(ranks)


def _where_they_hang(ranks: Sequence[_Rank]) -> str:
    """Return the stacks of these ranks' threads."""
    for rank in ranks:
        assert rank.process.pid is not None  # it has started
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid, signal.SIGUSR1)
    time.sleep(patience(_SETTLE_SECONDS))
    return "".join(f"rank {rank.number} hung here:\n{rank.written_stacks()}" for rank in ranks)


def _raise_first_failure(ranks: Sequence[_Rank]) -> NoReturn:
    """Raise an error: a rank that died explains the others' errors, else the earliest counts."""
    # The others may be about to fail for the same reason, or be the reason.
    time.sleep(patience(_SETTLE_SECONDS))
    for rank in ranks:
        rank.listen()
    failures = {rank.number: rank.reports[Stage.FAILED] for rank in ranks if Stage.FAILED in rank.reports}
    texts = [f"\nrank {number} raised:\n{failure.traceback}" for number, failure in failures.items()]
    dead = [rank for rank in ranks if rank.has_died and not rank.may_die]
    error = _death(dead, len(ranks)) if dead else _raised(min(failures.values()).error)
    raise error from RankTraceback("\n".join(texts)) if texts else None


def _raised(pickled: bytes) -> BaseException:
    """Return what a rank has raised, as far as this process can have it."""
    try:
        error: BaseException = _load(pickled, "a rank's error")
    except RuntimeError as not_loaded:
        return not_loaded
    if isinstance(error, SystemExit):  # would end the caller, and after sys.exit(0) as if all were well
        return RankDied(f"a rank ended without a result: sys.exit({error.code!r})")
    return error


def _load(pickled: bytes, what: str) -> Any:
    """Return what a rank has sent; its class may be one that this process cannot import."""
    try:
        return pickle.loads(pickled)  # noqa: S301 - from our own process
    except Exception as error:
        raise RuntimeError(f"{what} cannot be made here: {error_text(error)}") from error


def _death(dead: Sequence[_Rank], world_size: int) -> RankDied:
    rank = dead[0]
    code: int = rank.reports[Stage.ENDED]
    names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
    how = f"killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"exit code {code}"
    when = "died after it had returned" if Stage.RETURNED in rank.reports else "ended without a result"
    stacks = [f"\nrank {one.number} crashed here:\n{text}" for one in dead if (text := one.written_stacks())]
    return RankDied(f"rank {rank.number} of {world_size} {when}: {how}{''.join(stacks)}")
