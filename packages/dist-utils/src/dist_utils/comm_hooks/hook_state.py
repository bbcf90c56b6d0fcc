"""The base of the states of communication hooks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.comm_hooks.bucket_watch import BucketWatch
from dist_utils.process_groups import GroupLike, OrderedWorker, group_of_model, resolve_group
from dist_utils.process_groups.known_terms import Bucket

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["HookState"]


class HookState:
    """What the state of every hook has: its ranks, its model, what the ranks have agreed on, and a worker.

    A base for states that are given to ``register_comm_hook`` instead of a process group. A subclass adds its
    options, and returns from :meth:`terms` what must be equal on all ranks.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD, looked up
            when used.

    Raises:
        TypeError: ``process_group`` is not a group.
        ValueError: This rank is not a member of the group.

    A pickled state leaves out its process group, as PyTorch's own hook states do. A warning says so, and the
    copy uses WORLD.

    Example:
        >>> class MyState(HookState):
        ...     bits = 8
        ...
        ...     def terms(self):
        ...         return {"bits": self.bits}
        >>> def my_hook(state, bucket):  # doctest: +SKIP
        ...     state.bucket_came()
        ...     state.require_same_bucket("my_hook", bucket)
        ...     return state.worker.submit(lambda group: average(bucket.buffer(), group))
    """

    def __init__(self, process_group: GroupLike = None) -> None:
        self._group = None if process_group is None else resolve_group(process_group)
        self._worker: OrderedWorker | None = None
        self._watch: BucketWatch | None = None

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group whose ranks average.

        Raises:
            ValueError: It was destroyed.
        """
        return resolve_group(self._group)

    @property
    def worker(self) -> OrderedWorker:
        """The worker for jobs of several collectives; made at first use, and again after :meth:`close`."""
        group = self.process_group
        if self._worker is None or self._worker.process_group is not group:
            self._worker = OrderedWorker(group, name=type(self).__name__, terms=self.terms)
        return self._worker

    @property
    def hosts(self) -> list[int]:
        """For each rank of the group, the number of its host; see :meth:`OrderedWorker.hosts`."""
        return self.worker.hosts()

    def terms(self) -> Mapping[str, object]:
        """Return what must be equal on all ranks, by name. They are compared before the first bucket."""
        return {}

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Take a model's process group, or check that the state's own has the same ranks.

        A hook cannot know the group of its model: without this call, a state of another group averages over
        that one.

        If two backward passes of the model end and the hook has got no bucket, a warning says so: the hook is
        not registered with this module, or the framework that was told to register it has ignored it.

        Args:
            ddp: The ``DistributedDataParallel`` module that the state is for. It is not kept alive.

        Returns:
            The state itself.

        Raises:
            TypeError: ``ddp`` is not a ``DistributedDataParallel`` module.
            ValueError: The model averages over other ranks than this state.

        Example:
            >>> ddp.register_comm_hook(state.bind(ddp), hook)  # doctest: +SKIP
        """
        self._group = group_of_model(ddp, self._group)
        self.bucket_came()  # stop expecting buckets of an earlier model
        self._watch = BucketWatch(ddp, type(self).__name__)
        return self

    def bucket_came(self) -> None:
        """Note that a bucket of the model has arrived, so the hook is in use."""
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def require_same_bucket(self, title: str, bucket: Bucket) -> None:
        """Return if all ranks give the same bucket to the same hook, or raise on all ranks.

        The state's :meth:`terms` are compared first. A refusal is raised again until :meth:`close`.

        Raises:
            AgreementError: As :func:`dist_utils.comm_hooks.require_same_bucket`.
        """
        self.worker.require_same_bucket(title, {}, bucket)

    def require_same_call(
        self, title: str, terms: Mapping[str, object], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Do as :meth:`require_same_bucket`, for a call on plain tensors.

        Args:
            title: The name of the function.
            terms: What must be equal besides the state's own terms, by name.
            tensors: The tensors of the call: their number, lengths, dtypes and kinds of device must be equal.
        """
        self.worker.require_same_call(title, terms, tensors)

    def wait(self) -> None:
        """Return when all jobs so far have run, with or without an error."""
        if self._worker is not None:
            self._worker.wait()

    def close(self) -> None:
        """End the worker's thread and private group; a later bucket makes new ones.

        Otherwise they end with the state, or with ``destroy_process_group``. After an error, call this on
        every rank to make a fresh start.
        """
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            warnings.warn(
                f"a {type(self).__name__} pickles without its process group; the copy uses WORLD",
                stacklevel=2,
            )
        return {**self.__dict__, "_group": None, "_worker": None, "_watch": None}
