"""Time and memory of communication hooks on one 25 MiB bucket, in local ranks and on emulated hosts."""

from __future__ import annotations

import ctypes
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from emulated_hosts import address, emulated_hosts
from rank_processes import run_rank_processes
from timings import slowest

from dist_utils.testing import grad_bucket

ELEMENTS = 25 * 2**20 // 4

Hooks: TypeAlias = Mapping[str, Callable[[Any], "torch.futures.Future[torch.Tensor]"]]
"""Hooks by name, as functions of a bucket."""
MakeHooks: TypeAlias = Callable[[], Hooks]
"""Makes the hooks where they run; a module-level function, so that it can be pickled."""


def real_bucket() -> Any:
    """Return the GradBucket of 25 MiB that DDP passes to its hook."""
    return grad_bucket([torch.zeros(ELEMENTS)])


def measure_time(rank: int, make_hooks: MakeHooks, repeats: int) -> dict[str, list[float]]:
    """Return the seconds of every run of every hook, in turns forwards and backwards."""
    bucket, hooks = real_bucket(), make_hooks()
    buffer = bucket.buffer()
    source = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {name: [] for name in hooks}
    for repeat in range(-1, repeats):  # the first round warms up
        for name in list(hooks) if repeat % 2 else reversed(list(hooks)):
            bucket.set_buffer(buffer.copy_(source))  # PyTorch's wrappers leave a 16-bit buffer behind
            dist.barrier()
            began = time.perf_counter()
            result = hooks[name](bucket).wait()
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result)  # as DDP does: PyTorch's wrappers leave the cast back to it
            if repeat >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def measure_memory(rank: int, make_hooks: MakeHooks, name: str) -> float:
    """Return by how many MiB one run of a hook raises the peak memory of a fresh process."""
    bucket, hook = real_bucket(), make_hooks()[name]
    large = bucket.buffer()
    large.normal_(generator=torch.Generator().manual_seed(rank))
    bucket.set_buffer(torch.ones(1000))  # loads code, starts threads
    hook(bucket).wait()
    bucket.set_buffer(large)
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)  # freed memory that the process still holds would hide new allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    hook(bucket).wait()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"no {field} in /proc/self/status")


def time_on_hosts(script: str, count: int, repeats: int, *, rate: str = "1gbit") -> dict[str, Any]:
    """Measure times with one rank on each of ``count`` emulated hosts.

    Args:
        script: A benchmark that calls :func:`be_a_rank` when it is run as ``script rank FOLDER``.
        count: Number of hosts.
        repeats: Passed to the script.
        rate: The rate of the links.
    """
    return slowest(run_on_hosts([script, "rank"], [f"--repeats={repeats}"], count, rate=rate))


def run_on_hosts(
    command: Sequence[str],
    options: Sequence[str],
    count: int,
    *,
    rate: str = "1gbit",
    ranks_per_host: int = 1,
    timeout: float = 600.0,
) -> list[dict[str, list[float]]]:
    """Run ``python COMMAND FOLDER OPTIONS`` on ``count`` emulated hosts; return each rank's output.

    Args:
        command: A command that joins a process group from the environment and writes ``FOLDER/RANK.json``.
        options: Arguments after the folder.
        count: Number of hosts.
        rate: The rate of the links.
        ranks_per_host: How many ranks run on each host; the ranks of a host are consecutive.
        timeout: Seconds until all are killed.
    """
    with tempfile.TemporaryDirectory() as folder, emulated_hosts(count, rate=rate) as hosts:
        places = [host for host in hosts for _ in range(ranks_per_host)]
        variables = {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": address(0)}
        run_rank_processes([*command, folder, *options], places, variables, timeout=timeout)
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(places))]


def be_a_rank(folder: Path, make_hooks: MakeHooks, repeats: int) -> None:
    """Run one rank on an emulated host."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps(measure_time(rank, make_hooks, repeats)))
    dist.barrier()
    dist.destroy_process_group()
