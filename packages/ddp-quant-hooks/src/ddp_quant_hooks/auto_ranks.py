"""The communication between ranks during a trial."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ddp_quant_hooks.auto_times import Arriving
from dist_utils import AgreementError, GroupLike, OrderedWorker, require_same_terms, resolve_group
from dist_utils.process_groups import collective_device
from dist_utils.torch_compat import group_timeout

__all__ = ["AutoRanks"]

_SOON = timedelta(seconds=30)
"""Ranks that have just received the same verdict all call again within this time."""


class AutoRanks:
    """The ranks that choose together.

    Holds no reference to the state, so that the state is freed as soon as its owner drops it.

    Args:
        group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD; looked up when used.
        name: The name of the state's class.
    """

    def __init__(self, group: GroupLike, name: str) -> None:
        self._group = group
        self._name = name
        self._worker: OrderedWorker | None = None
        self._agreed_in: weakref.ref[dist.ProcessGroup] | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Their group."""
        return resolve_group(self._group)

    @property
    def worker(self) -> OrderedWorker:
        """The worker for exchanges of times and exact means; made at first use, by :meth:`agree`."""
        if self._worker is None:
            self._worker = OrderedWorker(self.process_group, name=self._name)
        return self._worker

    @property
    def moved(self) -> bool:
        """Whether these ranks have agreed in a former WORLD group."""
        return self._agreed_in is not None and self._agreed_in() is not self.process_group

    def agree(
        self, terms: Callable[[], Mapping[str, object]], try_again: Callable[[], None] | None = None
    ) -> None:
        """Compare, once, what must be identical on all ranks.

        Args:
            terms: Returns what must be identical, by name.
            try_again: If the ranks differ, called on all of them before they are compared again: an error may
                have occurred when some had made their choice and others had not. ``None``: a difference is an
                error.

        Raises:
            AgreementError: Something differs, or a rank does not take part.
            Exception: What ``terms`` raises; the other ranks get an ``AgreementError``.
        """
        if self._agreed_in is not None:
            return
        group, failed_before = self.process_group, self._worker is not None
        if self._worker is None:
            self._worker = OrderedWorker(group, name=self._name, terms=terms)
        try:
            self._worker.agree()
        except AgreementError as error:
            if failed_before or try_again is None or error.missing or not self._all_try_again():
                raise
            try_again()
            self._worker = OrderedWorker(group, name=self._name, terms=terms)
            self._worker.agree()
        self._agreed_in = weakref.ref(group)

    def _all_try_again(self) -> bool:
        """Return whether every rank calls this, soon after it was told that the ranks differ."""
        group = self.process_group
        timeout = min(_SOON, group_timeout(group, collective_device(group)) or _SOON)
        try:
            require_same_terms(group, f"{self._name}, which tries again,", timeout=timeout)
        except AgreementError:
            return False
        return True

    def agreed_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the bytes of the buckets of a pass, if all ranks have the same.

        Raises:
            AgreementError: They differ, or a rank does not take part.
        """
        require_same_terms(self.process_group, f"{self._name}'s trial", {"bytes of buckets": list(sizes)})
        return sizes

    def largest(self, values: Sequence[float]) -> Largest:
        """Start to find the largest of each number over all ranks."""
        return Largest(self.worker, values)

    def rest(self) -> None:
        """End the thread and the private group until they are needed again."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def close(self) -> None:
        """Like :meth:`rest`; also, the ranks are compared again before the next use."""
        self.rest()
        self._agreed_in = None


class Largest:
    """The largest of each number over all ranks, while it is being found.

    Args:
        worker: For the exchange.
        values: The values of this rank; the same number of them on all ranks.
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

        self._own, self._arrived = own, arrived  # alive until the result arrives
        self._done = worker.submit(job, device=device, name="auto_hook:slowest_rank")

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        self._done.wait()
        return self._arrived[0].read()
