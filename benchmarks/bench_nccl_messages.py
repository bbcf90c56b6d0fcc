"""What messages between ranks take of the host with NCCL, beside one ``all_to_all``.

    python benchmarks/bench_nccl_messages.py --world-size 2 4 8

Each rank sends 1 KiB to every other one, and receives as much from it: as messages
(dist_utils.start_messages, which calls dist.batch_isend_irecv), and as one dist.all_to_all. Both take turns;
medians of the host's time until the call returns, and until its work has been waited for, which on a GPU
is no wait. Ranks share a GPU where there are too few, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Writes
results/nccl_messages.json beside this file; without NCCL it says so and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machine import describe_machine

from dist_utils import start_messages
from dist_utils.testing import nccl_can_run, run_ranks

RESULTS = Path(__file__).parent / "results" / "nccl_messages.json"
WARM = 20

Call = Callable[[], Sequence[Any]]


def host_times(rank: int, world_size: int, repeats: int) -> dict[str, list[float]]:
    """Return this rank's microseconds until each call returned, and until it was waited for."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=rank, world_size=world_size, device_id=device)
    group = dist.group.WORLD
    assert group is not None
    incoming, outgoing = ([torch.zeros(256, device=device) for _ in range(world_size)] for _ in range(2))
    peers = [peer for peer in range(world_size) if peer != rank]
    calls: dict[str, Call] = {
        "start_messages": lambda: start_messages(
            group,
            receives=[(peer, incoming[peer]) for peer in peers],
            sends=[(peer, outgoing[peer]) for peer in peers],
        ),
        "all_to_all": lambda: [dist.all_to_all(incoming, outgoing, async_op=True)],
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for repeat in range(WARM + repeats):
        for name, call in calls.items():
            torch.cuda.synchronize()
            dist.barrier()
            torch.cuda.synchronize()
            began = time.perf_counter()
            works = call()
            started = time.perf_counter() - began
            for work in works:
                work.wait()
            if repeat >= WARM:
                times[name].append((started, time.perf_counter() - began))
    return {
        name: [round(1e6 * statistics.median(one[place] for one in found), 1) for place in (0, 1)]
        for name, found in times.items()
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=60)
    options = parser.parse_args()
    if not nccl_can_run(max(options.world_size)):
        print(
            f"NCCL cannot run {max(options.world_size)} ranks here: nothing is measured, nothing is written"
        )
        return
    calls: dict[str, Any] = {}
    for world_size in options.world_size:
        ranks = run_ranks(host_times, world_size, world_size, options.repeats, backend=None, timeout=300)
        calls[f"{world_size} ranks"] = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        print(f"{world_size} ranks, us of the host [started, waited]: {calls[f'{world_size} ranks']}")
    found = {**describe_machine(), "gpu": torch.cuda.get_device_name(), "us of the host": calls}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
