"""What a trial asks of all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ddp_quant_hooks.auto_times import Arriving
from dist_utils import GroupLike, OrderedWorker, require_same_terms, resolve_group
from dist_utils.process_groups import collective_device

__all__ = ["AutoRanks"]


class AutoRanks:
    """The ranks that choose together. Does not know the state, which could not become garbage at once.

    Args:
        group: As in :func:`dist_utils.resolve_group`; looked up when used.
        name: Of the state's class.
    """

    def __init__(self, group: GroupLike, name: str) -> None:
        self._group = group
        self._name = name
        self._worker: OrderedWorker | None = None
        self._agreed = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Their group."""
        return resolve_group(self._group)

    @property
    def worker(self) -> OrderedWorker:
        """Where they exchange times and exact means; made at first use, by :meth:`agree`."""
        if self._worker is None:
            self._worker = OrderedWorker(self.process_group, name=self._name)
        return self._worker

    def agree(self, terms: Callable[[], Mapping[str, object]]) -> None:
        """Compare, once, what must be alike.

        Args:
            terms: Returns that, by name.

        Raises:
            AgreementError: Something is not, or a rank does not come.
            Exception: What ``terms`` raises; the other ranks get an ``AgreementError``.
        """
        if self._agreed:
            return
        if self._worker is None:
            self._worker = OrderedWorker(self.process_group, name=self._name, terms=terms)
        self._worker.agree()
        self._agreed = True

    def agreed_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the bytes of the buckets of a pass, if all ranks have the same.

        Raises:
            AgreementError: They have not, or a rank does not come.
        """
        require_same_terms(self.process_group, f"{self._name}'s trial", {"bytes of buckets": list(sizes)})
        return sizes

    def largest(self, values: Sequence[float]) -> Largest:
        """Begin to compare numbers with those of the other ranks."""
        return Largest(self.worker, values)

    def rest(self) -> None:
        """End the thread and the private group until they are needed again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def close(self) -> None:
        """As :meth:`rest`; and what must be alike is compared again."""
        self.rest()
        self._agreed = False


class Largest:
    """Numbers on their way to all ranks and back: of each, the largest.

    Args:
        worker: For the exchange.
        values: Of this rank; as many on all ranks.
    """

    def __init__(self, worker: OrderedWorker, values: Sequence[float]) -> None:
        device = collective_device(worker.process_group)
        own = torch.tensor(values, dtype=torch.float64, pin_memory=device.type != "cpu")
        arrived: list[Arriving] = []

        def job(group: dist.ProcessGroup) -> torch.Tensor:
            there = own.to(device, non_blocking=True)
            dist.all_reduce(there, dist.ReduceOp.MAX, group=group)
            arrived.append(Arriving(there))
            return there

        self._own, self._arrived = own, arrived  # alive until they are there
        self._done = worker.submit(job, device=device, name="auto_hook:slowest_rank")

    def read(self) -> list[float]:
        """Return the numbers, when they have come."""
        self._done.wait()
        return self._arrived[0].read()
