"""The base of the states of hooks: what ranks agree on before they send, and a worker."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dist_utils.comm_hooks.bucket_watch import BucketWatch
from dist_utils.comm_hooks.wait_clock import WaitClock
from dist_utils.process_groups.groups import GroupLike, group_behind, group_of_model, resolve_group
from dist_utils.process_groups.ordered_worker import OrderedWorker

if TYPE_CHECKING:
    from typing_extensions import Self


class Bucket(Protocol):
    """The parts of ``GradBucket`` that are compared."""

    def index(self) -> int:
        """Return its number in the pass."""

    def buffer(self) -> torch.Tensor:
        """Return its gradients."""

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters that these belong to."""


class AgreedBucket:
    """A bucket that all ranks give to the same hook: one object for every pass in which it comes again.

    Attributes:
        plan: What a state has decided about it once, for all passes; ``None``: nothing so far.
    """

    plan: Any = None

    def __init__(self, worker: OrderedWorker | None, bucket: Bucket) -> None:
        self._worker, self._kind = worker, _kind_of(bucket.buffer())
        self._parameters = [(weakref.ref(one), one.stride()) for one in bucket.parameters()]

    def comes_again(self, worker: OrderedWorker | None, bucket: Bucket) -> bool:
        """Return whether this is the bucket, its values come in the same order, and the ranks still agree."""
        parameters = bucket.parameters()
        return (
            worker is not None
            and worker is self._worker
            and worker.error is None
            and _kind_of(bucket.buffer()) == self._kind
            and len(parameters) == len(self._parameters)
            and all(
                known() is one and one.stride() == strides
                for (known, strides), one in zip(self._parameters, parameters, strict=True)
            )
        )


def _kind_of(buffer: torch.Tensor) -> tuple[int, torch.dtype, torch.device, bool]:
    return buffer.numel(), buffer.dtype, buffer.device, buffer.is_sparse


_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, OrderedWorker] = weakref.WeakKeyDictionary()
"""What has compared for a group itself; none has a thread."""


def require_same_bucket(
    owner: GroupLike | OrderedWorker, title: str, options: Mapping[str, object], bucket: Bucket
) -> None:
    """Return if all ranks give the same bucket to the same hook with the same options, or raise on all ranks.

    The ranks are compared (see :func:`dist_utils.require_same_terms`) for every new bucket: in a model's
    first backward pass, and after ``DistributedDataParallel`` has rebuilt its buckets. If they do not agree,
    every later call for this owner raises the same error, as the ranks may have come differently far: go on
    with a new worker, or a new process group.

    Ranks that have used two hooks around one network, and then continue with different ones, are not
    compared again.

    Args:
        owner: A worker, or a process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD. A
            refusal is the worker's first error, and ends its private group. That of a group is raised for
            everything that is compared in this way and has no worker.
        title: The name of the hook.
        options: What must be equal, by name.
        bucket: From ``DistributedDataParallel``.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or earlier.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known bucket; otherwise half a millisecond or more.
    """
    buffer = bucket.buffer()
    terms = {
        **options,
        "bucket": buffer.dtype,
        "values in the bucket": buffer.numel(),
        "sparse": buffer.is_sparse,
        "index of the bucket": bucket.index(),
    }
    _require(owner, title, terms, bucket.parameters()[0])


def require_same_call(
    owner: GroupLike | OrderedWorker,
    title: str,
    terms: Mapping[str, object],
    tensors: Sequence[torch.Tensor] = (),
) -> None:
    """Return if all ranks make the same call on plain tensors, or raise on all.

    Like :func:`require_same_bucket`, for tensors outside of buckets.

    Args:
        owner: Likewise.
        title: The name of the function.
        terms: What must be equal, by name.
        tensors: The tensors of the call: their number, lengths, dtypes and kinds of device must be equal.

    Raises:
        AgreementError: As :func:`dist_utils.require_same_terms`, now or earlier.
        RuntimeError, TypeError, ValueError: As :func:`dist_utils.resolve_group`.

    Cost:
        A table look-up for a known call; otherwise half a millisecond or more. Calls whose tensors have
        another length in every step are compared in every step.
    """
    if tensors:
        terms = {**terms, "tensors": [(one.numel(), one.dtype, one.device.type) for one in tensors]}
    _require(owner, title, terms)


def _require(
    owner: GroupLike | OrderedWorker, title: str, terms: Mapping[str, object], about: object | None = None
) -> None:
    if not isinstance(owner, OrderedWorker):
        group = resolve_group(owner)
        owner = _workers.get(group) or _workers.setdefault(group, OrderedWorker(group))
    owner.require_same_terms(title, terms, about=about)


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
        ...     buffer = bucket.buffer()
        ...     try:
        ...         state.begin_bucket("my_hook", bucket)
        ...         job = partial(average, buffer)  # of the group
        ...         return state.worker.submit(job, device=buffer.device)
        ...     except Exception as error:  # raised here, it would leave DDP in a pass
        ...         state.fail(error)
        ...         return failed_future(error, buffer)
    """

    def __init__(self, process_group: GroupLike = None) -> None:
        self._group = None if process_group is None else weakref.ref(resolve_group(process_group))
        self._worker: OrderedWorker | None = None
        self._watch: BucketWatch | None = None
        self._clock = WaitClock()
        self._agreed_buckets: dict[tuple[str, int], AgreedBucket] = {}

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group whose ranks average.

        Raises:
            ValueError: It was destroyed.
        """
        return resolve_group(None if self._group is None else group_behind(self._group))

    @property
    def has_own_group(self) -> bool:
        """Whether it was given a group, or bound to a model of one, and does not look up WORLD."""
        return self._group is not None

    @property
    def worker(self) -> OrderedWorker:
        """The worker for jobs of several collectives; made at first use, and again after :meth:`close`."""
        group = self.process_group
        if self._worker is None or not self._worker.serves(group):
            self._worker = OrderedWorker(group, name=type(self).__name__, terms=self.terms, note=self.note)
        return self._worker

    @property
    def seconds_waited(self) -> float:
        """How long this rank's backward passes have waited for averages at their ends, in seconds.

        From the moment when a pass has computed everything to the moment when ``DistributedDataParallel`` has
        all averages: what communication adds to a step, and how long other ranks were late. It includes the
        copies from buckets to ``.grad``, which ``gradient_as_bucket_view=True`` avoids, and the last steps of
        an overlapped optimizer. On an accelerator it is the time of its stream, as far as that has come:
        reading it does not wait.

        Counted are passes in which buckets came, except those that a CUDA graph captures or replays.

        Cost:
            Some microseconds in each pass.

        Example:
            >>> before = state.seconds_waited  # doctest: +SKIP
            >>> loss.backward()  # doctest: +SKIP
            >>> waited = state.seconds_waited - before  # doctest: +SKIP
        """
        return self._clock.seconds()

    def hosts(self) -> list[int]:
        """Return for each rank of the group the number of its host; see :meth:`OrderedWorker.hosts`."""
        return self.worker.hosts()

    def terms(self) -> Mapping[str, object]:
        """Return what must be equal on all ranks, by name.

        They are compared once, before the first bucket, and again after :meth:`close` or :meth:`bind`: who
        changes them in between must close the state.
        """
        return {}

    def note(self) -> str:
        """Return what this rank tells the others about itself; see :meth:`OrderedWorker.notes`."""
        return ""

    def bind(self, ddp: DistributedDataParallel) -> Self:
        """Take a model's process group, or check that the state's own has the same ranks.

        A hook cannot know the group of its model: without this call, a state of another group averages over
        that one.

        From now on ``optimizer.step()`` raises an :class:`UnaveragedGradientsError` if gradients of the model
        came outside of ``no_sync()`` and in no bucket; see :class:`BucketWatch`. If the hook is not
        registered with this module, perhaps because a framework has ignored it, a warning says so.

        A state that was in use is closed, as :meth:`close` does, so that the ranks compare its terms again:
        bind it on every rank. A state with an error keeps that.

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
        named = None if self._group is None else self.process_group
        group = group_of_model(ddp, named)
        if self._worker is not None and self._worker.error is None:
            self.close()
        self._group = weakref.ref(group)
        if self._watch is not None:
            self._watch.end()  # of an earlier model
        self._watch = BucketWatch(ddp, type(self).__name__, self)
        return self

    def bucket_came(self) -> None:
        """Note that a bucket of the model has arrived, so all its gradients so far are averaged."""
        if self._watch is not None:
            self._watch.bucket_came()

    def measure_wait(self, device: torch.device) -> None:
        """Count the end of this backward pass in :attr:`seconds_waited`; once for a pass is enough.

        For a hook that does not call :meth:`begin_bucket`.

        Args:
            device: Where the bucket's gradients are.
        """
        # A hook may pass on some buckets to another one, but all of a pass are averaged.
        self._clock.bucket_came(device, None if self._watch is None else self._watch.bucket_came)

    def begin_bucket(self, title: str, bucket: Bucket) -> AgreedBucket:
        """Begin a bucket: what every hook calls first, and what a subclass extends by its own preparations.

        The bucket has arrived, as :meth:`bucket_came` notes, the end of the pass is measured, as
        :meth:`measure_wait` does, and all ranks give the same bucket to the same hook, or raise. The state's
        :meth:`terms` are compared before the first bucket, and then what belongs to each bucket: its index,
        dtype, length and sparsity. A refusal is raised again until :meth:`close`.

        Args:
            title: The name of the hook.
            bucket: From ``DistributedDataParallel``.

        Returns:
            What stands for this bucket of these parameters from now on, until :meth:`close`.

        Raises:
            AgreementError: As :func:`dist_utils.comm_hooks.require_same_bucket`. An error of a hook belongs
                to :meth:`fail` and to :func:`dist_utils.comm_hooks.failed_future`.
        """
        self.bucket_came()
        self.measure_wait(bucket.buffer().device)
        key = title, bucket.index()
        agreed = self._agreed_buckets.get(key)
        if agreed is None or not agreed.comes_again(self._worker and self.worker, bucket):
            require_same_bucket(self.worker, title, {}, bucket)
            agreed = self._agreed_buckets[key] = AgreedBucket(self._worker, bucket)
        return agreed

    def require_same_bucket(self, title: str, bucket: Bucket) -> None:
        """Do as :meth:`begin_bucket`, and return nothing."""
        self.begin_bucket(title, bucket)

    def require_same_call(
        self, title: str, terms: Mapping[str, object], tensors: Sequence[torch.Tensor]
    ) -> None:
        """Return if all ranks make the same call on plain tensors, or raise on all, as with buckets.

        Args:
            title: The name of the function.
            terms: What must be equal besides the state's own terms, by name.
            tensors: The tensors of the call: their number, lengths, dtypes and kinds of device must be equal.
        """
        require_same_call(self.worker, title, terms, tensors)

    def fail(self, error: BaseException) -> None:
        """Keep an error of the hook as the worker's first one, which every later bucket raises.

        If a job has run on the worker's thread (on CPUs and with Gloo), this ends the private group, so that
        the other ranks hear of the error soon. Otherwise they get one at their timeout: they wait for this
        rank to agree, to connect or, with NCCL, in a collective of the group itself, which belongs to the
        user. Does nothing if there is no worker yet.
        """
        if self._worker is not None:
            self._worker.fail(error)

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
        self._agreed_buckets.clear()

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            warnings.warn(
                f"a {type(self).__name__} pickles without its process group; the copy uses WORLD",
                stacklevel=2,
            )
        none: dict[str, Any] = {
            "_group": None,
            "_worker": None,
            "_watch": None,
            "_clock": WaitClock(),
            "_agreed_buckets": {},
        }
        return {**self.__dict__, **none}
