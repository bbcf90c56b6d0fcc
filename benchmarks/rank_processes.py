"""One process per rank, here or on emulated hosts: all end when one fails, or when this program ends."""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from emulated_hosts import address, emulated_hosts

_LOOK_SECONDS = 0.05


def on_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    rate: str | None = None,
    placement: Sequence[int] | None = None,
    timeout: float = 600.0,
    group_timeout: float | None = None,
) -> list[Any]:
    """Run ``function(rank, *args)`` on every rank, with one thread, and return the results.

    Args:
        function: A function of a benchmark's module; a Gloo process group exists when it is called.
        world_size: How many ranks there are.
        args: Passed to the function; they and its results must pickle.
        rate: The rate of the emulated hosts' links; ``None``: all ranks run on this machine, on loopback.
        placement: The host of each rank; by default each has a host of its own.
        timeout: Seconds until all are killed.
        group_timeout: Seconds that a collective may take; by default as long as all.

    Raises:
        EmulationUnavailableError: Hosts cannot be emulated.
        RuntimeError: A rank on a host failed; the message is that of the first one.
        TimeoutError: Ranks on hosts took too long.
        Exception: What a rank on loopback raised, see :func:`dist_utils.testing.run_ranks`.
    """
    if rate is None:
        from dist_utils.testing import run_ranks  # noqa: PLC0415 - the demo's parent needs no torch

        return run_ranks(function, world_size, *args, timeout=timeout, group_timeout=group_timeout)
    placement = list(range(world_size)) if placement is None else placement
    with tempfile.TemporaryDirectory() as text, emulated_hosts(len(set(placement)), rate=rate) as hosts:
        job = Path(text) / "job"
        job.write_bytes(pickle.dumps((function, args, group_timeout or timeout)))
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": address(placement[0])}
        try:
            run_rank_processes(
                [__file__, sys.argv[0], str(job)],
                [hosts[host] for host in placement],
                variables,
                timeout=timeout,
            )
        except RuntimeError as error:
            failed = sorted(job.parent.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
            raise RuntimeError(failed[0].read_text() if failed else str(error)) from error
        return [pickle.loads(job.with_suffix(f".{rank}").read_bytes()) for rank in range(world_size)]  # noqa: S301 - ours


def _be_a_rank(script: Path, job: Path) -> None:
    """Run one rank of a script on an emulated host; write its result, or why it failed."""
    import torch  # noqa: PLC0415 - as above
    import torch.distributed as dist  # noqa: PLC0415

    sys.modules["__main__"] = importlib.import_module(script.stem)  # whose functions were pickled
    function, args, seconds = pickle.loads(job.read_bytes())  # noqa: S301 - ours
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    rank = dist.get_rank()
    try:
        result = function(rank, *args)
    except Exception as error:  # noqa: BLE001 - the caller decides
        traceback.print_exc()
        job.with_suffix(f".{rank}.error").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)  # threads of a hook may wait forever
    job.with_suffix(f".{rank}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_rank_processes(
    command: Sequence[str],
    places: Sequence[Sequence[str]],
    variables: Mapping[str, str],
    *,
    timeout: float = 600.0,
) -> None:
    """Run ``python COMMAND`` once per rank, with the environment that ``init_process_group`` needs.

    Args:
        command: A command that joins the process group.
        places: The prefix of each rank's command: a host, or nothing for this machine.
        variables: Environment variables for every rank: ``MASTER_ADDR``, and others that differ from here.
        timeout: Seconds until all are killed.

    Raises:
        RuntimeError: A rank failed; the others were killed.
        TimeoutError: They took too long, and were killed.
    """
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    # The system kills them with this program, even if it is killed itself, or before they have asked for it.
    tied = ["setpriv", "--pdeathsig=KILL", "sh", "-c", f'[ $PPID = {os.getpid()} ] && exec "$@"', "sh"]
    if shutil.which("setpriv") is None:
        tied = []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **variables}
    environment |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(len(places))}
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank, place in enumerate(places):
            line = [*place, *tied, sys.executable, "-W", "ignore", *command]
            # Ctrl-C in the terminal must reach only this program, which ends them.
            own = {**environment, "RANK": str(rank)}
            ranks.append(subprocess.Popen(line, env=own, start_new_session=True))
        _wait(ranks, time.monotonic() + timeout)
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while None in (codes := [process.poll() for process in ranks]) or any(codes):
        if any(codes):
            ended = {rank: code for rank, code in enumerate(codes) if code}
            raise RuntimeError(f"ranks ended with exit codes {ended}; the others were stopped")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{codes.count(None)} of {len(ranks)} ranks did not end in time")
        time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    _be_a_rank(Path(sys.argv[1]), Path(sys.argv[2]))
