"""The state that a user gives the hook: options, and everything kept between steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist

from ddp_quant_hooks.agreement import Agreement
from ddp_quant_hooks.checkpoints import ResidualCheckpoints
from ddp_quant_hooks.decisions import Decisions
from ddp_quant_hooks.feedback import Feedback
from ddp_quant_hooks.options import ErrorFeedback, checked
from ddp_quant_hooks.residuals import Residuals
from ddp_quant_hooks.resume import Bucket
from ddp_quant_hooks.routes import Route
from ddp_quant_hooks.saved import VERSION
from ddp_quant_hooks.statistics import Counter, Statistics
from ddp_quant_hooks.tensor_buckets import StandIns
from ddp_quant_hooks.wire_format import WIRE_VERSION, Format, Layout
from dist_utils import GroupLike, OrderedWorker, resolve_group

__all__ = ["QuantizedAllreduceState"]


class QuantizedAllreduceState(ResidualCheckpoints):
    """Options of :func:`quantized_allreduce_hook`, and what it keeps between steps. One for each model.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD; looked up
            when used.
        bits: Bits of a value on the wire, 8 or 4.
        block_size: Values that share a scale: a multiple of 32 up to 4096. ``None``: 128 for 8 bits, 32
            for 4.
        gather: The format in which averages are sent back from the rank that computed them, with three or
            more ranks: ``"int8"``, ``"int4"`` (with ``bits=4``), ``"bf16"`` or ``"fp16"`` (both relative to
            the block's scale, so nothing overflows). ``None``: in ``bits`` bits. 16 bits avoid the second
            rounding and send 50 % more bytes.
        rotate: Spread the values of blocks with a few large ones over the block before they are quantized, so
            that the error does not depend on the largest (half of it on heavy tails). Values that are zero on
            all ranks stay zero. Needs a ``block_size`` that is a power of two; ``None``: rotate if it is one.
        error_feedback: ``"none"``; ``"shard"``: add the rounding errors of the averages of a rank's shard to
            the next step's, 4 / W bytes of memory a value (with levels of a, b, ... ranks 4 / a + 4 / (a b) +
            ...), without effect between two ranks, which make no shards; ``"both"``: also those of a rank's
            own gradients, 4 bytes a value. ``None``: ``"none"`` for 8 bits, ``"both"`` for 4. It removes the
            bias over many steps and makes each step noisier, which AdamW's second moment accumulates. With
            such an optimizer ``"none"`` is the better choice.
        min_bytes: Smaller buckets are averaged without compression, by
            :func:`ddp_compress_hooks.allreduce_hook`. ``None``: 128 KiB for each rank, 1 MiB at most: on
            loopback the bytes that are saved do not make up for the cost of the messages. On a link of 1
            Gbit/s 65536 pays off.
        exact_1d: Average parameters of one dimension or none (biases, norms) without compression, in a
            small all-reduce of their own. Off by default: in the models that were measured their
            errors are no larger than those of other parameters, and losses the same. It is for models in
            which they are much smaller than their neighbors in the bucket.
        sample_every: Measure the error of every n-th quantized bucket, with one exact all-reduce and a
            copy of the bucket in fp32. 0: never.
        levels: The sizes of the levels in which many ranks average; their product is the number of ranks.
            With ``(8, 16)``, 128 ranks average in rows of 8 consecutive ranks, then the 16 rows average their
            results. A rank sends 2 (7 + 15) messages for each chunk instead of 2 x 127, and the same number
            of bytes; the mean of a row is rounded once more, by half a step at most. ``None``: up to 16
            ranks, every rank sends to every other one; beyond that, in levels if they take less time by the
            measured cost of messages. Rows are inside hosts if ``torchrun`` tells how many ranks each has.
            ``(W,)``: no levels.

    Raises:
        TypeError: ``process_group`` is not a group, or an option is of another type.
        ValueError: This rank is not a member of the group, or an option has an unknown value. Levels whose
            product is not the number of ranks raise it before the first bucket, except on a single rank,
            which averages nothing.

    All ranks must have the same options: they are compared before the first bucket.

    A pickled state has only its options, and a warning is given if that loses something. Use
    :meth:`state_dict` for the residuals.

    Example:
        >>> state = QuantizedAllreduceState(error_feedback="shard")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, quantized_allreduce_hook)  # doctest: +SKIP
    """

    def __init__(
        self,
        process_group: GroupLike = None,
        *,
        bits: Literal[8, 4] = 8,
        block_size: int | None = None,
        gather: Format | None = None,
        rotate: bool | None = None,
        error_feedback: ErrorFeedback | None = None,
        min_bytes: int | None = None,
        exact_1d: bool = False,
        sample_every: int = 0,
        levels: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.options = checked(
            bits=bits,
            block_size=block_size,
            gather=gather,
            rotate=rotate,
            error_feedback=error_feedback,
            min_bytes=min_bytes,
            exact_1d=exact_1d,
            sample_every=sample_every,
            levels=levels,
        )
        """The options, with the defaults filled in. They do not change: the ranks have compared them."""
        self._group = None if process_group is None else resolve_group(process_group)
        self._worker: OrderedWorker | None = None
        self._agreement = Agreement(type(self).__name__)
        self.counter = Counter()
        self.stand_ins = StandIns()
        self.route = self._make_route()
        residuals = Residuals(
            own=self.error_feedback == "both",
            shard=self.error_feedback in {"shard", "both"},
            own_in_buckets=self.route.own_in_buckets,
        )
        self.feedback = Feedback(residuals)
        self.decisions = Decisions(self.options, self.route, residuals)

    def _make_route(self) -> Route:
        """Return the route of values, for this state's options."""
        return Route(self.options)

    @property
    def scatter(self) -> Layout:
        """The format in which values are sent."""
        return self.route.scatter

    @property
    def gather(self) -> Layout:
        """The format in which averages are sent."""
        return self.route.gather

    @property
    def error_feedback(self) -> ErrorFeedback:
        """Which residuals are kept."""
        return self.options.error_feedback

    @property
    def min_bytes(self) -> int:
        """Smaller buckets are averaged without compression; the default depends on the group's size."""
        return self.options.least_bytes(self.process_group.size())

    @property
    def exact_1d(self) -> bool:
        """Whether parameters of at most one dimension are averaged without compression."""
        return self.options.exact_1d

    @property
    def sample_every(self) -> int:
        """The error of one in this many quantized buckets is measured; 0: of none."""
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
        """What was done in the backward passes that have ended."""
        return self.counter.read()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Make all collectives on plain tensors in a ``with`` block one step.

        With error feedback, a step's rounding errors are added to the values of the same keys in the next
        step. A step counts if the block ends without an error, every call succeeds with finite values, and
        :meth:`discard_step` is not called before the next step begins. Otherwise residuals are what they were
        before the step.

        A call outside of any such block is a step of its own; or, inside ``backward()``, all calls of that
        pass are one.

        Raises:
            RuntimeError: Inside of another ``step()``.
            ValueError: This state averages the buckets of a model with error feedback.

        Example:
            >>> with state.step():  # doctest: +SKIP
            ...     for name, change in changes.items():
            ...         all_reduce(change, dist.ReduceOp.AVG, state, key=name)
        """
        step = self.feedback.begin_step(self.wait_for_jobs)
        try:
            yield
        except BaseException:
            step.close(ended_well=False)
            raise
        step.close(ended_well=True)

    def agree(self, bucket: Bucket) -> None:
        """Compare with the other ranks, before a new bucket, what must be identical on all of them.

        Raises:
            AgreementError: Something differs, or a rank does not take part; :meth:`close` allows a fresh
                start.
        """
        self._agreement.on_bucket(self.worker, bucket)

    def agree_on_call(self, call: str, terms: Mapping[str, object], tensors: Sequence[torch.Tensor]) -> None:
        """Like :meth:`agree`, before a call on plain tensors.

        Args:
            call: The name of the function.
            terms: What must be identical on all ranks, by name.
            tensors: The tensors of the call.
        """
        self._agreement.on_call(self.worker, call, terms, tensors)

    def close(self) -> None:
        """End the thread and the private group, free the scratch memory; a later bucket makes new ones.

        Otherwise they end with the state, or with ``destroy_process_group``. After an error in
        communication this is how every rank makes a fresh start; residuals stay.
        """
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        self.route.free()
        self.decisions.start_over()

    def wait_for_jobs(self) -> None:
        """Return when all buckets so far are averaged, with or without an error."""
        if self._worker is not None:
            self._worker.wait()

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal when residuals are saved and when they are loaded."""
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
            "levels": self.options.levels,
        }

    def _lengths(self, count: int, device: torch.device) -> tuple[int, int, int]:
        return self.route.lengths(self.process_group, count, device)

    def _terms(self) -> dict[str, object]:
        self.route.require_fit(self.process_group)
        return {
            **asdict(self.options),
            "ranks per host": self.route.ranks_per_host(self.process_group),
            "wire format version": WIRE_VERSION,
            "first bucket or call": self._agreement.first,
            **self._agreement_terms(),
        }

    def refuse_capture(self, buffer: torch.Tensor) -> None:
        """Raise if a bucket is captured in a CUDA graph, which would repeat one step's decisions forever.

        Raises:
            RuntimeError: It is, and there is something to decide.
        """
        if (self.error_feedback != "none" or self.sample_every) and _is_captured(buffer):
            raise RuntimeError(
                "a CUDA graph cannot hold what changes from step to step: capture with "
                "error_feedback='none' and sample_every=0"
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
