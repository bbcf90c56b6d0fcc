"""What a state has done so far, counted on any thread."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Counts:
    """What was counted so far, with how much less was sent than in full precision.

    Integers and seconds are sums, and are subtracted; what else there is is the last one.
    """

    @property
    @abstractmethod
    def _sent_and_native(self) -> tuple[int, int]:
        """The bytes that were sent, and those that full precision would have sent."""

    @property
    def bytes_saved(self) -> int:
        """The bytes saved compared with full precision."""
        sent, native = self._sent_and_native
        return native - sent

    @property
    def bytes_ratio(self) -> float | None:
        """What was sent, as a share of what full precision sends; ``None`` if that is nothing."""
        sent, native = self._sent_and_native
        return sent / native if native else None

    def as_dict(self) -> dict[str, int | float]:
        """Return attributes and properties by name, as plain numbers, without those that are ``None``."""
        values = {**asdict(self), "bytes_saved": self.bytes_saved, "bytes_ratio": self.bytes_ratio}
        return {name: value for name, value in values.items() if value is not None}

    def __sub__(self, earlier: Self) -> Self:
        """Return what was done since ``earlier``."""
        if type(earlier) is not type(self):
            return NotImplemented
        sums = [one.name for one in fields(self) if one.type in ("int", "float")]
        return replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in sums})


@dataclass(frozen=True)
class Statistics(Counts):
    """What a state has done so far, on this rank. The difference of two is what it did in between.

    A bucket here is what is sent together: a bucket of ``DistributedDataParallel``; in a call on plain
    tensors, those of one dtype and device; with FSDP2, the gradients of one module. A CUDA graph counts once,
    when it is captured.

    Attributes:
        quantized_buckets: Buckets that were sent in few bits.
        plain_buckets: Buckets that were averaged without compression: small, sparse or fp64.
        bytes_sent: Payload that this rank sent, including exact parameters and samples. (The bytes of sparse
            buckets count nowhere: what their collective sends is not known here.)
        bytes_between_hosts: Those of them that went to ranks on other hosts (other nodes, with a
            :class:`HierarchicalAllreduceState`); the others stayed inside. What a host's link carries is the
            sum over its ranks. What is averaged without compression counts as if ranks were in a ring, in
            their order.
        bytes_of_allreduce: What a ring all-reduce of the same buckets in their own dtype would have sent;
            half of that, a reduce-scatter or an all-gather, where shards were reduced or gathered.
        relative_error: The relative error of the last bucket that was sampled (``sample_every``), in the L2
            norm; ``None`` if none was.
        seconds_waited: How long the ends of backward passes waited for averages; see
            :attr:`dist_utils.comm_hooks.HookState.seconds_waited`.

    Example:
        >>> before = state.statistics  # doctest: +SKIP
        >>> train()  # doctest: +SKIP
        >>> for name, value in (state.statistics - before).as_dict().items():  # doctest: +SKIP
        ...     writer.add_scalar(f"gradients/{name}", value, step)
    """

    quantized_buckets: int = 0
    plain_buckets: int = 0
    bytes_sent: int = 0
    bytes_between_hosts: int = 0
    bytes_of_allreduce: int = 0
    relative_error: float | None = None
    seconds_waited: float = 0.0

    @property
    def _sent_and_native(self) -> tuple[int, int]:
        return self.bytes_sent, self.bytes_of_allreduce


_COUNTS = tuple(one.name for one in fields(Statistics) if one.type == "int")


class BucketCounter:
    """Counts buckets, both on the caller's thread and on the worker's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * len(_COUNTS)
        self._error: tuple[torch.Tensor, Any] | None = None
        """The last error, and on an accelerator the event after which it is there."""

    def add(
        self,
        nbytes: int,
        world_size: int,
        bytes_sent: int,
        bytes_between_hosts: int,
        *,
        quantized: bool,
        error: torch.Tensor | None = None,
    ) -> None:
        """Count one bucket.

        Args:
            nbytes: The size in bytes of the bucket.
            world_size: The world size of the group that averaged it.
            bytes_sent: What was sent.
            bytes_between_hosts: What of that went to other hosts.
            quantized: Whether it was sent in few bits.
            error: Its relative error, where that was measured.
        """
        reference = ring_bytes(nbytes, world_size)
        counts = (quantized, not quantized, bytes_sent, bytes_between_hosts, reference)
        with self._lock:
            self._counts = [so_far + more for so_far, more in zip(self._counts, counts, strict=True)]
            if error is not None:
                device, computed = error.device, None
                if device.type != "cpu":
                    computed = torch.get_device_module(device).current_stream(device).record_event()
                self._error = error, computed

    def read(self) -> Statistics:
        """Return what was counted. Waits for an accelerator if it measures an error."""
        error, computed = self._error or (None, None)
        if computed is not None:
            computed.synchronize()
        found = None if error is None else float(error)
        return Statistics(**dict(zip(_COUNTS, self._counts, strict=True)), relative_error=found)


def ring_bytes(nbytes: int, world_size: int) -> int:
    """Return how many bytes a rank sends in a ring all-reduce of ``nbytes``."""
    return 2 * (world_size - 1) * nbytes // world_size


def bytes_around_ring(nbytes: int, ring: Sequence[int], hosts: Sequence[int], rank: int) -> tuple[int, int]:
    """Return how many bytes a rank sends in a ring all-reduce, and how many of them to another host.

    Args:
        nbytes: The size of what is averaged.
        ring: The ranks, each of which sends to the next one.
        hosts: For each rank, the number of its host.
        rank: The one that sends.
    """
    following = ring[(ring.index(rank) + 1) % len(ring)]
    sent = ring_bytes(nbytes, len(ring))
    return sent, sent if hosts[following] != hosts[rank] else 0
