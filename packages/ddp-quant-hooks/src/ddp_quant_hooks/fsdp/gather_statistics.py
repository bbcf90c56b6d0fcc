"""What gathers of parameters have sent so far."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from ddp_quant_hooks.statistics import Counts


@dataclass(frozen=True)
class GatherStatistics(Counts):
    """What FSDP's gathers of a model's parameters have done so far, on this rank.

    The difference of two is what was done in between.

    Attributes:
        quantized_gathers: Gathers of a module in few bits.
        exact_gathers: Those in which this rank sent or received values of some parameters, too, because their
            differences (with ``differences``) had too large an error, or were the first ones.
        plain_gathers: Those in full precision. The log says once for each module why.
        reused_gathers: Those that were served by what the forward pass had received (``keep_for_backward``,
            ``differences``), and sent nothing, or nothing between hosts.
        bytes_sent: Payload that this rank sent.
        bytes_between_hosts: Those of them that went to ranks on other hosts. What a host's link carries is
            the sum over its ranks.
        bytes_of_all_gather: What this rank sends if all these gathers are in a ring and in full precision, as
            FSDP's own.

    Example:
        >>> before = handle.statistics  # doctest: +SKIP
        >>> train()  # doctest: +SKIP
        >>> (handle.statistics - before).bytes_ratio  # doctest: +SKIP
    """

    quantized_gathers: int = 0
    exact_gathers: int = 0
    plain_gathers: int = 0
    reused_gathers: int = 0
    bytes_sent: int = 0
    bytes_between_hosts: int = 0
    bytes_of_all_gather: int = 0

    @property
    def _sent_and_native(self) -> tuple[int, int]:
        return self.bytes_sent, self.bytes_of_all_gather


class GatherCounter:
    """Counts gathers, on the threads of forward and backward passes.

    Attributes:
        statistics: What was counted so far.
    """

    def __init__(self) -> None:
        self.statistics = GatherStatistics()
        self._lock = threading.Lock()

    def add(self, **more: int) -> None:
        """Count more of some attributes of the statistics."""
        with self._lock:
            so_far = self.statistics
            self.statistics = replace(
                so_far, **{name: getattr(so_far, name) + count for name, count in more.items()}
            )
