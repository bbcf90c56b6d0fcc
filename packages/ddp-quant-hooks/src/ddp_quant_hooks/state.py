"""What the quantised hook needs to know and keeps: options, residuals, scratch memory, counts."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from ddp_quant_hooks import exact_parameters
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.chunks import Span, cut, shards
from ddp_quant_hooks.exchanges import Exchange, Wire, average_quantised, take_turns
from ddp_quant_hooks.feedback import Feedback
from ddp_quant_hooks.link import Link
from ddp_quant_hooks.messages import WIRE_VERSION, Format
from ddp_quant_hooks.options import ErrorFeedback, checked
from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.residuals import BucketResiduals, Residuals
from ddp_quant_hooks.resume import Bucket
from ddp_quant_hooks.saved import VERSION
from ddp_quant_hooks.scratch import Scratch
from dist_utils import GroupLike, OrderedWorker, resolve_group
from dist_utils.bucket_terms import require_same_bucket
from dist_utils.process_groups import runs_on_host

__all__ = ["ErrorFeedback", "QuantizedAllreduceState", "Statistics", "Task"]

_CHUNK_ELEMENTS = 5 << 18
"""About so many values are on the wire at a time, one such chunk behind another: five of a 25 MiB bucket.
Shorter ones cost more messages (four loopback ranks took 20 % longer with half as many), longer ones more
memory and more time in which the wire idles (4 % on 1 Gbit/s with twice as many)."""

_CHUNK_ELEMENTS_ON_STREAMS = 1 << 26
"""The same where the host only enqueues: kernels are so much faster than the wire that nothing is gained by
shorter chunks, and each costs launches. It bounds the memory for a very large bucket."""

_MIN_BYTES = 1 << 16


@dataclass(frozen=True)
class Statistics:
    """What a state has done so far, on this rank.

    Attributes:
        quantised_buckets: Buckets that were sent in few bits.
        plain_buckets: Buckets that were averaged without compression: small, sparse or fp64.
        bytes_sent: Payload that this rank sent, with what exact parameters and samples took. (Sparse
            buckets do not count: what their collective sends is not known here.)
        bytes_of_allreduce: What a ring all-reduce of the same buckets in their own dtype would have sent.
        relative_error: Of the last bucket that was sampled (``sample_every``), in the L2 norm;
            ``None`` if none was.
    """

    quantised_buckets: int = 0
    plain_buckets: int = 0
    bytes_sent: int = 0
    bytes_of_allreduce: int = 0
    relative_error: float | None = None

    @property
    def bytes_saved(self) -> int:
        """How many bytes less than an all-reduce were sent."""
        return self.bytes_of_allreduce - self.bytes_sent


@dataclass(frozen=True)
class Task:
    """How one bucket is averaged, decided alike on every rank.

    Attributes:
        running: The backward pass that it belongs to.
        kept: Its residuals.
        sampled: Measure its error.
    """

    running: BackwardPass
    kept: BucketResiduals
    sampled: bool


class QuantizedAllreduceState(ResidualCheckpoints):
    """Options of :func:`quantized_allreduce_hook`, and what it keeps between steps. One for each model.

    Args:
        process_group: As in :func:`dist_utils.resolve_group`; ``None`` is WORLD, looked up when used.
        bits: Of a value on the wire: 8, or 4.
        block_size: Values that share a scale: a multiple of 32 up to 4096. ``None``: 128 for 8 bits, 32
            for 4.
        gather: How averages travel back from the rank that made them, with three ranks or more: ``"int8"``,
            ``"int4"`` (with ``bits=4``), ``"bf16"`` or ``"fp16"`` (both relative to the block's scale, so
            nothing overflows). ``None``: in ``bits`` bits. 16 bits spare the second rounding for half as
            many bytes again.
        error_feedback: ``"none"``; ``"shard"``: add what the averages of a rank's shard lost to the next
            step's, 8 / W bytes of memory a value, no effect between two ranks, who make no shards;
            ``"both"``: also what a rank's own gradients lost, 8 bytes a value. ``None``: ``"none"`` for 8
            bits, ``"both"`` for 4.
        min_bytes: Smaller buckets are averaged without compression, by
            :func:`ddp_compress_hooks.allreduce_hook`.
        exact_1d: Average parameters of one dimension or none (biases, norms) without compression. They
            are few, and often much larger or smaller than their neighbours in the bucket.
        sample_every: Measure the error of every so many-th quantised bucket: one exact all-reduce and a
            copy of the bucket in fp32. 0: never.

    Raises:
        TypeError: ``process_group`` is no group, or an option is of another type.
        ValueError: This rank is not a member of the group, or an option has no such choice.

    All ranks must have the same options: they are compared before the first bucket.

    Pickles with its options only, and warns if that loses something. Use :meth:`state_dict` for the
    residuals.

    Example:
        >>> state = QuantizedAllreduceState(error_feedback="shard")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    _OWN_IN_BUCKETS = False
    """What a rank loses itself belongs to buckets, not to parameters."""

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        bits: Literal[8, 4] = 8,
        block_size: int | None = None,
        gather: Format | None = None,
        error_feedback: ErrorFeedback | None = None,
        min_bytes: int = _MIN_BYTES,
        exact_1d: bool = False,
        sample_every: int = 0,
    ) -> None:
        super().__init__()
        self.options = checked(
            bits=bits,
            block_size=block_size,
            gather=gather,
            error_feedback=error_feedback,
            min_bytes=min_bytes,
            exact_1d=exact_1d,
            sample_every=sample_every,
        )
        """What was chosen, with the defaults filled in. Does not change: the ranks have compared it."""
        self.scatter = self.options.scatter_layout
        """How values travel."""
        self.gather = self.options.gather_layout
        """How averages travel."""
        self._group = None if process_group is None else resolve_group(process_group)
        self._worker: OrderedWorker | None = None
        self._scratches: dict[torch.device, list[Scratch]] = {}
        self._statistics = Statistics()
        self._sampled_error: torch.Tensor | None = None
        self._counting = threading.Lock()  # buckets are counted on the caller's thread and on the worker's
        self._taken = 0
        self._bucket: tuple[int, torch.dtype | None] = 0, None  # the last one
        self.feedback = Feedback(
            Residuals(
                own=self.error_feedback == "both",
                shard=self.error_feedback in {"shard", "both"},
                own_in_buckets=self._OWN_IN_BUCKETS,
            )
        )

    @property
    def error_feedback(self) -> ErrorFeedback:
        """Which residuals are kept."""
        return self.options.error_feedback

    @property
    def min_bytes(self) -> int:
        """Below how many bytes buckets are averaged without compression."""
        return self.options.min_bytes

    @property
    def exact_1d(self) -> bool:
        """Whether parameters of at most one dimension are averaged without compression."""
        return self.options.exact_1d

    @property
    def sample_every(self) -> int:
        """Of how many quantized buckets one's error is measured; 0: of none."""
        return self.options.sample_every

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group that averages."""
        return resolve_group(self._group)

    @property
    def worker(self) -> OrderedWorker:
        """Where buckets are averaged, one after another; made at first use."""
        group = self.process_group
        if self._worker is None or self._worker.process_group is not group:
            self._worker = OrderedWorker(group, name=type(self).__name__, terms=self._terms)
        return self._worker

    @property
    def statistics(self) -> Statistics:
        """What was done in the backward passes that are over."""
        error = None if self._sampled_error is None else float(self._sampled_error)
        return replace(self._statistics, relative_error=error)

    def close(self) -> None:
        """End the thread and the private group, free the scratch memory; a later bucket makes new ones.

        Otherwise they end with the state, or with ``destroy_process_group``. After an error in
        communication this is how every rank makes a fresh start; residuals stay.
        """
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self._scratches.clear()
        self._taken = 0  # after an error ranks may not have come equally far

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal where residuals are saved and where they are loaded."""
        group = self.process_group
        return {
            "version": VERSION,
            "state": type(self).__name__,
            "rank": group.rank(),
            "world_size": group.size(),
            "error_feedback": self.error_feedback,
            "scatter": (self.scatter.format, self.scatter.block_size),
            "gather": (self.gather.format, self.gather.block_size),
            "exact_1d": self.exact_1d,
            "min_bytes": self.min_bytes,
        }

    def _wait_for_jobs(self) -> None:
        if self._worker is not None:
            self._worker.wait()

    # ---- for the hook ----

    def agree(self, bucket: Bucket) -> None:
        """Compare with the other ranks, before a bucket that is new, what must be alike on all of them.

        Raises:
            AgreementError: Something is not, or a rank does not come; :meth:`close` makes a fresh start.
        """
        buffer = bucket.buffer()
        self._bucket = buffer.numel(), buffer.dtype
        worker = self.worker.agree()
        require_same_bucket(self.process_group, type(self).__name__, {"state": worker}, bucket)

    def _terms(self) -> dict[str, object]:
        values, dtype = self._bucket
        return {
            **asdict(self.options),
            "wire format version": WIRE_VERSION,
            "first bucket": f"{values} values of {dtype}",
            **self._agreement_terms(),
        }

    def begin_bucket(
        self,
        bucket: Bucket,
        average: Callable[[BackwardPass, Bucket], torch.futures.Future[torch.Tensor]],
    ) -> BackwardPass:
        """Return the backward pass that a bucket belongs to. On the caller's thread.

        Args:
            bucket: However it will be averaged.
            average: Averages a bucket of the pass.

        Raises:
            RuntimeError: It is captured in a CUDA graph, which would repeat one step's decisions for ever.
        """
        if (self.error_feedback != "none" or self.sample_every) and _is_captured(bucket.buffer()):
            raise RuntimeError(
                "a CUDA graph cannot hold what changes from step to step: capture with "
                "error_feedback='none' and sample_every=0"
            )
        if self.error_feedback == "none" or self.process_group.size() == 1:
            return BackwardPass()
        return self.feedback.begin_bucket(bucket, average, self._wait_for_jobs)

    def take_bucket(self, running: BackwardPass, bucket: Bucket, values: torch.Tensor) -> Task:
        """Return how a bucket will be averaged. On the caller's thread, where all ranks come in one order."""
        kept = BucketResiduals()
        if self.error_feedback != "none":
            own, shard, _ = self._lengths(values.numel(), values.device)
            kept = self.feedback.residuals.of_bucket(
                bucket.parameters(),
                self._position(running, bucket),
                own=own,
                shard=shard,
                device=values.device,
            )
            running.kept.append(kept)
            unused = running.unused_part(bucket.parameters())
            if unused:
                spans = self._spans(values.numel(), values.device)
                running.at_end.append(partial(kept.keep, unused, *spans))
        sampled = self.sample_every > 0 and self._taken % self.sample_every == 0
        self._taken += 1
        return Task(running, kept, sampled)

    def take_plain_bucket(self, running: BackwardPass, bucket: Bucket) -> None:
        """Note a bucket that is averaged without compression."""
        values = bucket.buffer()
        self.count_plain(values, self.process_group.size())
        if self.error_feedback == "none":
            return
        running.unused_part(bucket.parameters())  # this rank's only gradients may be here
        if not values.is_sparse:
            self.feedback.residuals.plain_bucket(bucket.parameters(), self._position(running, bucket))

    @staticmethod
    def _position(running: BackwardPass, bucket: Bucket) -> int:
        return bucket.index() if running.held is not None else running.position

    def average(
        self, group: dist.ProcessGroup, values: torch.Tensor, task: Task, exact: list[torch.Tensor]
    ) -> None:
        """Average flat ``values`` in place. A job for :attr:`worker`; every rank ends with the same bits.

        Args:
            group: Whose ranks average.
            values: The bucket.
            task: From :meth:`take_bucket`.
            exact: Parts of the bucket to average without compression.
        """
        bytes_sent = 0
        reference = apart = None
        if task.sampled:
            reference = values.float() / group.size()
            bytes_sent += _all_reduce(reference, group)
        if exact:
            apart = exact_parameters.set_apart(exact, group.size())
            bytes_sent += _all_reduce(apart, group)
            if self.error_feedback != "none":
                task.running.failed(~apart.isfinite().all())
        bytes_sent += self._exchange(group, values, task)
        if apart is not None:
            exact_parameters.put_back(exact, apart)
        if reference is not None:
            self._sampled_error = _relative_error(values, reference)
        self._count(values, group.size(), bytes_sent, quantised=1)

    def count_plain(self, values: torch.Tensor, world_size: int) -> None:
        """Count a bucket that is averaged without compression."""
        bytes_sent = 0 if values.is_sparse else _ring_bytes(values, world_size)
        self._count(values, world_size, bytes_sent, plain=1)

    def _exchange(self, group: dist.ProcessGroup, values: torch.Tensor, task: Task) -> int:
        """Average ``values`` and return how many bytes were sent."""
        link = Link(group, range(group.size()))
        wire = self._wire(link, task)

        def exchanges() -> Iterator[Callable[[Scratch], Exchange]]:
            shard_start = 0
            for index, chunk in enumerate(self._chunks(values.numel(), values.device)):
                yield partial(
                    average_quantised,
                    values=values[chunk.start : chunk.stop],
                    wire=wire,
                    index=index,
                    own_start=chunk.start,
                    shard_start=shard_start,
                )
                shard_start += len(shards(chunk, link.size, self.scatter.block_size)[link.index])

        take_turns(exchanges(), self._scratch(values.device), values.device)
        return link.bytes_sent

    def _lengths(self, count: int, device: torch.device) -> tuple[int, int, int]:
        own, shard = self._spans(count, device)
        return sum(map(len, own)), sum(map(len, shard)), self._chunk_values(device)

    def _spans(self, count: int, device: torch.device) -> tuple[list[Span], list[Span]]:
        """Return which of a bucket's values the residuals are of, in their order: own, and of shards."""
        group, own = self.process_group, [Span(0, count)]
        if group.size() == 2:
            return own, []
        return own, [
            shards(chunk, group.size(), self.scatter.block_size)[group.rank()]
            for chunk in self._chunks(count, device)
        ]

    def _wire(self, link: Link, task: Task) -> Wire:
        failed = None if self.error_feedback == "none" else task.running.failed
        return Wire(link, self.scatter, self.gather, task.kept.own, task.kept.shard, failed)

    def _chunks(self, count: int, device: torch.device) -> list[Span]:
        return cut(count, self._chunk_values(device), self.scatter.block_size)

    def _chunk_values(self, device: torch.device) -> int:
        on_host = runs_on_host(self.process_group, device)
        return _CHUNK_ELEMENTS if on_host else _CHUNK_ELEMENTS_ON_STREAMS

    def _scratch(self, device: torch.device) -> list[Scratch]:
        return self._scratches.setdefault(device, [])

    def _count(
        self,
        values: torch.Tensor,
        world_size: int,
        bytes_sent: int,
        *,
        quantised: int = 0,
        plain: int = 0,
    ) -> None:
        with self._counting:
            so_far = self._statistics
            self._statistics = Statistics(
                so_far.quantised_buckets + quantised,
                so_far.plain_buckets + plain,
                so_far.bytes_sent + bytes_sent,
                so_far.bytes_of_allreduce + _ring_bytes(values, world_size),
            )

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None or self.error_feedback != "none":
            warnings.warn(
                f"a {type(self).__name__} pickles its options only: the copy uses WORLD and has no residuals",
                stacklevel=2,
            )
        return asdict(self.options)

    def __setstate__(self, options: dict[str, Any]) -> None:
        self.__init__(None, **options)  # type: ignore[misc] # as copy and pickle make objects


def _is_captured(buffer: torch.Tensor) -> bool:
    return buffer.device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _all_reduce(values: torch.Tensor, group: dist.ProcessGroup) -> int:
    """Sum ``values`` in place, and return what that sends."""
    dist.all_reduce(values, group=group)
    return _ring_bytes(values, group.size())


def _relative_error(values: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    difference = (values.float() - exact).norm()
    return torch.where(difference == 0, 0.0, difference / exact.norm())


def _ring_bytes(values: torch.Tensor, world_size: int) -> int:
    return 2 * (world_size - 1) * values.numel() * values.element_size() // world_size
