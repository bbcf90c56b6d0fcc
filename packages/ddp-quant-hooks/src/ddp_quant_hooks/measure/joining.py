"""Which rank this process is, and how it finds the others: by options, torchrun or Slurm."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.torch_compat import default_store

__all__ = ["Place", "PlaceError", "find_place", "first_host", "join", "leave_after_error", "nccl_is_there"]

_DEFAULT_PORT = 29500
_TO_TELL = 5.0
"""Seconds that torch gets to raise its own error."""
_LEFT = "ddp_quant_hooks/measure/left"
"""Key of the store: how many ranks have left after an error."""
_EXAMPLE = "torchrun --standalone --nproc-per-node 2 -m ddp_quant_hooks.measure"


class PlaceError(ValueError):
    """Nothing says which rank this process is, or how to find the others."""


@dataclass(frozen=True)
class Place:
    """The place of a process among all.

    Attributes:
        rank: The rank of the process.
        world_size: Number of processes.
        address: The address of rank 0's host.
        port: The port on which rank 0 listens.
        node: A name that the ranks of a node share, and no others.
    """

    rank: int
    world_size: int
    address: str
    port: int
    node: str


def find_place(
    environ: Mapping[str, str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    port: int | None = None,
) -> Place:
    """Return the place that options give, or else the environment: of torchrun, else of ``srun``.

    Args:
        environ: The environment.
        rank: The rank of this process.
        world_size: Number of processes.
        address: The address of rank 0's host.
        port: The port on which rank 0 listens.

    Raises:
        PlaceError: Something is missing or no number, or the rank is out of range.
    """
    found = _from_slurm(environ)
    for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if environ.get(key):
            found[key] = environ[key]
    given = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": address, "MASTER_PORT": port}
    found |= {key: str(value) for key, value in given.items() if value is not None}
    found.setdefault("MASTER_PORT", str(_DEFAULT_PORT))
    missing = [key for key in given if key not in found]
    if missing:
        raise PlaceError(_what_is_missing(missing))
    place = Place(
        rank=_number("RANK", found["RANK"]),
        world_size=_number("WORLD_SIZE", found["WORLD_SIZE"]),
        address=found["MASTER_ADDR"],
        port=_number("MASTER_PORT", found["MASTER_PORT"]),
        node=_node(environ),
    )
    if place.world_size < 2:
        raise PlaceError(
            f"measuring needs at least two ranks, the world size is {place.world_size}: {_EXAMPLE}"
        )
    if place.rank >= place.world_size:
        raise PlaceError(f"rank {place.rank} is out of range for a world size of {place.world_size}")
    return place


def join(place: Place, *, nccl: bool, timeout: timedelta) -> None:
    """Make the default process group, of all ranks.

    Args:
        place: The place of this process.
        nccl: Whether GPUs talk through NCCL; the hosts always do through Gloo.
        timeout: The time for the others to join, and for each collective.

    Raises:
        RuntimeError: A rank does not join in time. If something else listens on the port, the process ends.
    """
    host = f"[{place.address}]" if ":" in place.address else place.address  # IPv6
    with _ending_without_answer(place, 2 * timeout.total_seconds() + _TO_TELL):  # torch tries twice
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            init_method=f"tcp://{host}:{place.port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
        )


@contextlib.contextmanager
def _ending_without_answer(place: Place, seconds: float) -> Iterator[None]:
    """End the process if this takes too long: torch waits forever for a listener that is not a store."""

    def end() -> None:
        sys.stderr.write(f"rank {place.rank}: {place.address}:{place.port} answers, but is not rank 0\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave_after_error(seconds: float = 3.0) -> None:
    """Return when all ranks know how it ended, or after ``seconds``.

    Rank 0 has the store with the verdict that the others are about to read.

    Args:
        seconds: How long rank 0 waits for the others: some of them may be dead.
    """
    with contextlib.suppress(RuntimeError, ValueError):  # there is no group, or no rank 0 any more
        store: Any = default_store()  # torch 2.6 does not declare its methods
        left, limit = store.add(_LEFT, 1), time.monotonic() + seconds
        while dist.get_rank() == 0 and left < dist.get_world_size() and time.monotonic() < limit:
            time.sleep(0.05)
            left = store.add(_LEFT, 0)


def nccl_is_there() -> bool:
    """Return whether this process could use a GPU through NCCL."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Return what ``srun`` says of this process; nothing in a batch script, which is no rank."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_NUM_TASKS" not in environ:
        return {}
    found = {"RANK": environ["SLURM_PROCID"], "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"]}
    if hosts := environ.get("SLURM_STEP_NODELIST"):
        found["MASTER_ADDR"] = first_host(hosts)
    numbers = [environ.get(key, "") for key in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    if all(number.isdigit() for number in numbers):  # steps of a job, and jobs on a node, need their own
        found["MASTER_PORT"] = str(20000 + (31 * int(numbers[0]) + int(numbers[1])) % 10000)
    return found


def first_host(hosts: str) -> str:
    """Return the first of Slurm's list of hosts, as in ``node[03-05,9],login``."""
    begin = re.match(r"([^,\[]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", hosts)
    if begin is None:
        raise PlaceError(f"SLURM_STEP_NODELIST names no host: {hosts!r}")
    return "".join(part or "" for part in begin.groups())


def _node(environ: Mapping[str, str]) -> str:
    """Return a name of this node. Containers may share a host's name, so launchers are asked first."""
    if "GROUP_RANK" in environ:  # torchrun's number of the node
        return environ["GROUP_RANK"]
    if "LOCAL_WORLD_SIZE" in environ and "RANK" in environ:
        return str(
            _number("RANK", environ["RANK"])
            // max(1, _number("LOCAL_WORLD_SIZE", environ["LOCAL_WORLD_SIZE"]))
        )
    return environ.get("SLURM_NODEID", "") or socket.gethostname()


def _number(key: str, text: str) -> int:
    if not text.isdecimal():  # isdigit() takes superscripts
        raise PlaceError(f"{key} must be a number from 0 on, got {text!r}")
    return int(text)


def _what_is_missing(missing: list[str]) -> str:
    options = {
        "RANK": "--rank",
        "WORLD_SIZE": "--world-size",
        "MASTER_ADDR": "--master-addr",
        "MASTER_PORT": "--master-port",
    }
    named = ", ".join(f"{key} ({options[key]})" for key in missing)
    return (
        f"nothing says {named}. Start it with a launcher, which tells every process:\n"
        f"  {_EXAMPLE}\n"
        "  srun --nodes 2 --ntasks-per-node 1 python -m ddp_quant_hooks.measure\n"
        "or start each rank by hand:\n"
        "  python -m ddp_quant_hooks.measure --rank 0 --world-size 2 --master-addr HOST_OF_RANK_0"
    )
