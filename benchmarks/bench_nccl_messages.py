"""What messages between ranks take of the host with NCCL, beside one ``all_to_all``.

    python benchmarks/bench_nccl_messages.py --world-size 2 4 8

Each rank sends 1 KiB to every other one, and receives as much from it: as messages
(dist_utils.start_messages, which calls dist.batch_isend_irecv), and as one dist.all_to_all; medians of the
host's time until the call returns, and until its work has been waited for, which on a GPU is no wait. Ranks
share a GPU where there are too few, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set. Writes
results/nccl_messages.json; without NCCL it says so and writes nothing.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import Benchmark, Found, Seconds, gpu_name, in_turns

from dist_utils import start_messages
from dist_utils.testing import nccl_can_run, run_ranks

STARTED = ", started"

Call = Callable[[], Sequence[Any]]


def host_times(rank: int, world_size: int, repeats: int) -> dict[str, list[float]]:
    """Return this rank's median microseconds until each call returned, and until it was waited for."""
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

    def run(name: str) -> Seconds:
        torch.cuda.synchronize()  # the ranks have met, on the GPU
        began = time.perf_counter()
        works = calls[name]()
        started = time.perf_counter() - began
        for work in works:
            work.wait()
        return Seconds({name + STARTED: started, name: time.perf_counter() - began})

    sides = {name: lambda name=name: run(name) for name in calls}
    times = in_turns(sides, repeats, warm_up=20, prepare=lambda _: torch.cuda.synchronize())
    return {
        name: [round(1e6 * statistics.median(times[kind]), 1) for kind in (name + STARTED, name)]
        for name in calls
    }


def cases(options: Namespace) -> Iterator[Found]:
    """Measure each number of ranks."""
    if not nccl_can_run(max(options.world_size)):
        print(f"NCCL cannot run {max(options.world_size)} ranks here: nothing is measured")
        return
    for world_size in options.world_size:
        ranks = run_ranks(host_times, world_size, world_size, options.repeats, backend=None, timeout=300)
        found = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        print(f"{world_size} ranks, us of the host [started, waited]: {found}")
        yield ("us of the host", f"{world_size} ranks"), found


if __name__ == "__main__":
    benchmark = Benchmark(__file__, __doc__, repeats=60)
    benchmark.parser.add_argument("--world-size", type=int, nargs="+", default=[2, 4, 8])
    benchmark.run({"us of the host": cases}, facts={"gpu": gpu_name()})
