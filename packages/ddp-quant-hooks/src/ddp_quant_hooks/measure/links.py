"""Latency and bandwidth of the links that the ranks talk over, and what kind of cluster they make."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dist_utils import start_messages
from dist_utils.process_groups import collective_device, runs_on_host

INSIDE, BETWEEN = "inside hosts", "between hosts"

_FIRST, _LONGEST = 1 << 16, 1 << 24
_ENOUGH = 0.15
"""Seconds for a message that is long enough: a rate limiter's burst and the latency no longer count then."""
_FAST = 30e9
"""Bytes a second each way: more than GPUs get by PCIe or host memory (2 to 20e9), less than by NVLink."""


@dataclass(frozen=True)
class Link:
    """What a message to the next rank costs while every rank of a ring sends one and receives one.

    Attributes:
        place: ``"inside hosts"``: all ranks of each host in a ring; ``"between hosts"``: one of each host.
        latency: Seconds for a message of 4 bytes, by the slowest rank.
        bandwidth: Bytes per second in each direction, both at once, by the slowest rank.
    """

    place: str
    latency: float
    bandwidth: float

    @property
    def gbit(self) -> float:
        """The bandwidth in Gbit/s."""
        return 8e-9 * self.bandwidth


@dataclass(frozen=True)
class Ranks:
    """The ranks that take part.

    Attributes:
        group: Their process group.
        hosts: For each rank the number of its host.
        device: The device of this rank's messages and buckets.
    """

    group: dist.ProcessGroup
    hosts: list[int]
    device: torch.device

    @property
    def on_host(self) -> bool:
        """Whether the host sends, as with Gloo, and does not only enqueue."""
        return runs_on_host(self.group, self.device)

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the largest of each value over all ranks, by a small all-reduce of all ranks."""
        numbers = torch.tensor(values, dtype=torch.float64, device=collective_device(self.group))
        dist.all_reduce(numbers, dist.ReduceOp.MAX, group=self.group)
        found: list[float] = numbers.tolist()
        return found


def describe_cluster(hosts: Sequence[int], links: Sequence[Link]) -> str:
    """Return in words which kind of cluster this is.

    That is one host, whose links are fast as NVLink or slow; several hosts with several ranks; or several
    hosts with one rank each.

    Args:
        hosts: For each rank the number of its host.
        links: The measured links.
    """
    gbit = {link.place: f"{link.gbit:.3g} Gbit/s each way" for link in links}
    counts = Counter(hosts).values()
    if len(counts) == 1:
        speed = "fast" if links[0].bandwidth >= _FAST else "slow"
        return f"one host with {len(hosts)} ranks and {speed} links inside it: {gbit[INSIDE]}"
    if max(counts) == 1:
        return f"{len(hosts)} hosts with one rank each: {gbit[BETWEEN]} between hosts"
    ranks = " to ".join(str(count) for count in sorted({min(counts), max(counts)}))
    return f"{len(counts)} hosts with {ranks} ranks each: {gbit[INSIDE]} inside, {gbit[BETWEEN]} between them"


def measure_links(ranks: Ranks) -> list[Link]:
    """Measure the links inside hosts and between them, whichever exist.

    Returns:
        One or two links, identical on all ranks.

    Cost:
        Collective; a second or two for each kind, more where 64 KiB take longer than that.
    """
    own = ranks.hosts[ranks.group.rank()]
    first = [ranks.hosts.index(host) for host in dict.fromkeys(ranks.hosts)]
    rings = {INSIDE: [rank for rank, host in enumerate(ranks.hosts) if host == own], BETWEEN: first}
    there = {INSIDE: len(first) < len(ranks.hosts), BETWEEN: len(first) > 1}
    return [_measure(place, ranks, ring) for place, ring in rings.items() if there[place]]


def _measure(place: str, ranks: Ranks, ring: Sequence[int]) -> Link:
    latency, nbytes = _exchange(ranks, ring, 4), _FIRST
    while (seconds := _exchange(ranks, ring, nbytes)) < _ENOUGH and nbytes < _LONGEST:
        nbytes *= 4
    return Link(place, latency, nbytes / seconds)


def _exchange(ranks: Ranks, ring: Sequence[int], nbytes: int) -> float:
    """Return the median seconds of an exchange with the neighbors, of the slowest rank."""
    incoming, outgoing = (torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device) for _ in range(2))
    seconds, repeats = 0.0, 2
    for _ in range(2):  # first to see how often
        times = []
        ranks.largest([0.0])  # begin together
        for _ in range(repeats if ranks.group.rank() in ring and len(ring) > 1 else 0):
            place, began = ring.index(ranks.group.rank()), time.perf_counter()
            receives, sends = [(ring[place - 1], incoming)], [(ring[(place + 1) % len(ring)], outgoing)]
            for arrival in start_messages(ranks.group, receives=receives, sends=sends):
                arrival.wait()
            synchronize(ranks.device)
            times.append(time.perf_counter() - began)
        (seconds,) = ranks.largest([statistics.median(times or [0.0])])
        repeats = max(2, min(500, int(_ENOUGH / seconds)))
    return seconds


def synchronize(device: torch.device) -> None:
    """Return when ``device`` has finished all its work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
