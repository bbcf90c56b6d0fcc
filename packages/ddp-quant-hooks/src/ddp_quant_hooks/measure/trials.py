"""One hook on one bucket: once alone, and once beside computation."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ddp_compress_hooks import allreduce_hook, bf16_compress_hook
from ddp_quant_hooks.candidates import Candidate
from ddp_quant_hooks.measure.agreed import largest_of_ranks
from ddp_quant_hooks.measure.computation import Computation, processor_time, synchronize
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import ring_bytes
from dist_utils.process_groups import runs_on_host
from dist_utils.testing import grad_bucket

__all__ = ["Gradients", "Sample", "Trial", "tiny_bucket"]

_BLOCK = 1 << 18
"""Random values for each rank: 1 MiB of fp32. Buckets repeat them."""
_WIRE_BYTES = {allreduce_hook: 4, bf16_compress_hook: 2}
"""Bytes of a value on the wire, for hooks that send a ring's share of all values."""


class Sample(NamedTuple):
    """What one run took."""

    seconds: float
    cpu: float
    """Processor time of this process, in seconds."""
    units: int
    """Units that were computed meanwhile."""


class Gradients:
    """Normal values, different on every rank, in one buffer for buckets of all sizes.

    Args:
        group: The process group whose ranks average.
        largest: Bytes of the largest bucket.
        device: The device of the buffer.
    """

    def __init__(self, group: dist.ProcessGroup, largest: int, device: torch.device) -> None:
        blocks = [
            torch.randn(
                _BLOCK,
                generator=torch.Generator("cpu").manual_seed(rank),
                dtype=torch.float32,
                device="cpu",
            )
            for rank in range(group.size())
        ]
        self._group = group
        self._own = blocks[group.rank()].to(device)
        self._mean = torch.stack(blocks).double().mean(0).to(device)
        self._buffer = torch.empty(-(-largest // (4 * _BLOCK)), _BLOCK, device=device, dtype=torch.float32)

    def fill(self, size: int) -> torch.Tensor:
        """Return this rank's values, ``size`` bytes of them."""
        blocks = -(-size // (4 * _BLOCK))
        self._buffer[:blocks].copy_(self._own)
        return self._buffer.view(-1)[: size // 4]

    def copy_seconds(self) -> float:
        """Return the seconds of copying a byte while all ranks do so. Collective."""
        self.fill(self._buffer.nbytes)  # gets the memory from the system
        largest_of_ranks(self._group, [0.0])  # begin together
        times = [time.perf_counter()]
        for _ in range(5):
            self.fill(self._buffer.nbytes)
            synchronize(self._buffer.device)
            times.append(time.perf_counter())
        seconds = statistics.median(after - before for before, after in itertools.pairwise(times))
        (slowest,) = largest_of_ranks(self._group, [seconds])
        return slowest / self._buffer.nbytes

    def error(self, average: torch.Tensor) -> float:
        """Return the distance of an average from the exact mean, in L2, relative to the mean's own length."""
        difference = length = 0.0
        for begin in range(0, average.numel(), _BLOCK):
            part = average[begin : begin + _BLOCK]
            mean = self._mean[: part.numel()]
            difference += float((part.double() - mean).square().sum())
            length += float(mean.square().sum())
        return float((difference / length) ** 0.5)


@dataclass
class Trial:
    """One hook on buckets of one size; collective.

    Attributes:
        name: The name of the hook.
        candidate: The hook, with its state.
        size: The size of the bucket, in bytes.
        beside: Whether this rank computes meanwhile.
    """

    name: str
    candidate: Candidate
    size: int
    beside: bool
    bucket: Any
    group: dist.ProcessGroup
    gradients: Gradients
    computation: Computation
    relative_error: float | None = None
    bytes_sent: int = 0

    def run(self) -> Sample:
        """Average a bucket once, on all ranks together."""
        buffer = self.gradients.fill(self.size)
        self.bucket.set_buffer(buffer)
        if self.beside:
            self.computation.run_alone()
        synchronize(buffer.device)
        sent_before = self._sent_so_far()
        largest_of_ranks(self.group, [0.0])  # begin together
        cpu_began, began = processor_time(buffer.device), time.perf_counter()
        future = self.candidate.hook(self.candidate.state, self.bucket)
        units = 0
        if self.beside:
            is_done = _watch(future, self.group, buffer.device)
            while not is_done():
                self.computation.run_unit()
                units += 1
        future.wait()
        synchronize(buffer.device)
        seconds, cpu = time.perf_counter() - began, processor_time(buffer.device) - cpu_began
        if self.relative_error is None and not self.beside:
            self.relative_error = self.gradients.error(buffer)
            self.bytes_sent = self._sent(sent_before)
        return Sample(seconds, cpu, units)

    def _sent_so_far(self) -> int:
        state = self.candidate.state
        return state.statistics.bytes_sent if isinstance(state, QuantizedAllreduceState) else 0

    def _sent(self, before: int) -> int:
        if self.candidate.hook in _WIRE_BYTES:
            return ring_bytes(self.size // 4 * _WIRE_BYTES[self.candidate.hook], self.group.size())
        return self._sent_so_far() - before


def tiny_bucket(device: torch.device) -> Any:
    """Return a bucket for a buffer of any size, with its own parameter, by which hooks identify it.

    A model of 25 MiB would be broadcast first, which takes seconds on a slow link.
    """
    return grad_bucket([torch.zeros(1, device=device, dtype=torch.float32)])


def _watch(
    future: torch.futures.Future[Any], group: dist.ProcessGroup, device: torch.device
) -> Callable[[], bool]:
    """Return a function that tells whether an average is there."""
    if runs_on_host(group, device):
        return future.done
    module = torch.get_device_module(device)
    stream, event = module.Stream(device), module.Event()
    with module.stream(stream):
        future.wait()  # on an accelerator the stream waits, not the host
        event.record()
    query: Callable[[], bool] = event.query
    return query
