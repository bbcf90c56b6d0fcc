"""One process per rank: all end when the first one fails, or when this program ends."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

_LOOK_SECONDS = 0.05


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
