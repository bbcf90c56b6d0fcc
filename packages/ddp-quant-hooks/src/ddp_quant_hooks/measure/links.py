"""Latency and bandwidth of the links that the ranks talk over."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.computation import processor_time, synchronize
from dist_utils import start_messages

__all__ = ["BETWEEN", "INSIDE", "Link", "measure_links"]

INSIDE, BETWEEN = "inside nodes", "between nodes"

_SHORT = 4
_FIRST, _LONGEST = 1 << 16, 1 << 24
_ENOUGH = 0.15
"""Seconds for a message that is long enough: a rate limiter's burst and the latency no longer count then."""


@dataclass(frozen=True)
class Link:
    """What a message to the next rank costs while every rank of a ring sends one and receives one.

    Attributes:
        place: ``"inside nodes"``: all ranks of each node in a ring; ``"between nodes"``: one of each node.
        latency: Seconds for a message of 4 bytes, by the slowest rank.
        bandwidth: Bytes per second in each direction, both at once, by the slowest rank.
        cpu_per_message: Processor seconds of a rank for sending and receiving 4 bytes.
        cpu_per_byte: Processor seconds of a rank for a byte that it sends and one that it receives. Both
            are 0 with an accelerator, for which the processor only waits.
        message_bytes: The size of the messages that the bandwidth was measured with.
    """

    place: str
    latency: float
    bandwidth: float
    cpu_per_message: float
    cpu_per_byte: float
    message_bytes: int

    @property
    def gbit(self) -> float:
        """The bandwidth in Gbit/s."""
        return 8e-9 * self.bandwidth


def measure_links(
    group: dist.ProcessGroup, nodes: Sequence[Sequence[int]], device: torch.device
) -> list[Link]:
    """Measure the links inside nodes and between them, whichever exist.

    Args:
        group: The process group whose ranks take part.
        nodes: Ranks in ``group`` of each node.
        device: The device of the messages.

    Returns:
        One or two links, identical on all ranks.

    Cost:
        Collective; one to three seconds for each kind, more where 64 KiB take longer than that.
    """
    rank = group.rank()
    found = []
    if max(map(len, nodes)) > 1:
        found.append(_measure(INSIDE, group, next(node for node in nodes if rank in node), device))
    if len(nodes) > 1:
        found.append(_measure(BETWEEN, group, [node[0] for node in nodes], device))
    return found


def _measure(place: str, group: dist.ProcessGroup, ring: Sequence[int], device: torch.device) -> Link:
    ring = ring if group.rank() in ring and len(ring) > 1 else []
    first, _ = _exchange(group, ring, _SHORT, 10, device)
    latency, cpu_per_message = _exchange(group, ring, _SHORT, _repeats(first, most=500), device)
    nbytes = _FIRST
    seconds, cpu = _exchange(group, ring, nbytes, 2, device)
    while seconds < _ENOUGH and nbytes < _LONGEST:
        nbytes *= 4
        seconds, cpu = _exchange(group, ring, nbytes, 1, device)
    if seconds < 2 * _ENOUGH:
        seconds, cpu = _exchange(group, ring, nbytes, _repeats(seconds, most=10), device)
    return Link(place, latency, nbytes / seconds, cpu_per_message, cpu / nbytes, nbytes)


def _repeats(seconds: float, *, most: int) -> int:
    return max(2, min(most, int(0.3 / seconds)))


def _exchange(
    group: dist.ProcessGroup, ring: Sequence[int], nbytes: int, repeats: int, device: torch.device
) -> tuple[float, float]:
    """Return median seconds and processor seconds of an exchange with the neighbors; of the slowest rank."""
    incoming, outgoing = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    times, cpu_times = [0.0, 0.0], [0.0, 0.0]
    largest_of_ranks(group, [0.0])  # begin together
    if ring:
        place = ring.index(group.rank())
        left, right = ring[place - 1], ring[(place + 1) % len(ring)]
        times, cpu_times = [time.perf_counter()], [processor_time(device)]
        for _ in range(repeats):
            for arrival in start_messages(group, receives=[(left, incoming)], sends=[(right, outgoing)]):
                arrival.wait()
            synchronize(device)
            times.append(time.perf_counter())
            cpu_times.append(processor_time(device))
    seconds, cpu = largest_of_ranks(group, [_median_step(times), _median_step(cpu_times)])
    return seconds, cpu


def _median_step(readings: Sequence[float]) -> float:
    return statistics.median(after - before for before, after in itertools.pairwise(readings))
