"""The main hook: what happens to one bucket, from ``backward()`` to the averaged gradient."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ddp_quant_hooks.averaging import Prepared, is_captured
from ddp_quant_hooks.exchange.exchange import Parts
from ddp_quant_hooks.exchange.values import Values, flat_real
from ddp_quant_hooks.feedback.step import Step
from ddp_quant_hooks.states import AveragingState, QuantizedAllreduceState
from dist_utils.comm_hooks import (
    buckets_only,
    check_gradient_dtype,
    completed_future,
    failed_future,
    is_pair,
    sparse_mean,
)
from dist_utils.process_groups import future_of_work
from dist_utils.torch_compat import GradBucket, profiler_range


@buckets_only
def quantized_allreduce_hook(
    state: QuantizedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with 16, 8 or 4 bits a value on the wire.

    Values are cut into blocks. A block is sent as small integers and one fp32 scale, its largest magnitude.
    The mean is computed in fp32. With three or more ranks, one rank computes the mean of each shard and sends
    it, quantized again, to the others. Some chunks of the bucket are sent while others are computed.

    Args:
        state: Options, residuals and statistics; one state for each model.
        bucket: From DDP. fp32, bf16, fp16 and complex64 are quantized; sparse, fp64 and complex128
            buckets, and those below ``min_bytes``, are averaged without compression.

    Returns:
        A future of ``bucket.buffer()`` holding the mean, in its dtype, bitwise identical on all ranks. A
        block with a NaN or an infinity on any rank is NaN. At world size 1 and for an empty bucket it is
        complete, and nothing is sent.

    Raises:
        TypeError: ``state`` is not a state, the bucket is not of a floating-point dtype, or the model is
            compiled with DDP's Python reducer, which hands over no buckets. Before any communication.
        ValueError: This rank is not in the group; before any communication.
        RuntimeError: A peer failed, memory for residuals is missing, or an option does not fit the ranks;
            raised by ``backward()``, or by the next one if the peer had already sent all that this step
            needed from it.

    Cost:
        With a block of 128 and 8 bits, two hosts of one rank send 1.03 bytes a value each, and H hosts
        2.06 (H - 1) / H: 0.258 of a ring all-reduce in fp32. Hosts of several ranks send as much in all, and
        their ranks send each other full precision. Scratch memory for a few chunks: of 1.3 million values up
        to five ranks, of more in proportion to the peers, at most of 8.4 million; with NCCL, of 67 million.
        2 (W - 1) messages for each chunk, fewer in levels: see ``levels`` of the state.

    Example:
        >>> ddp.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)  # doctest: +SKIP
    """
    if not isinstance(state, AveragingState):
        raise TypeError(
            "quantized_allreduce_hook needs a QuantizedAllreduceState as its state, "
            f"got {type(state).__name__}"
        )
    return average_bucket("quantized_allreduce_hook", state, bucket)


def average_bucket(
    name: str, state: AveragingState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as its state does, for the hook of this name."""
    buffer = check_buffer(name, bucket)
    read = _ReadBucket(bucket.index(), buffer, bucket.parameters())
    with profiler_range(f"{name}:bucket_{read.number}"):
        if is_captured(buffer.device):
            state.refuse_capture(buffer)
        group = state.process_group
        if group.size() == 1:
            return completed_future(buffer)
        try:
            agreed = state.begin_bucket(name, read)
            if agreed.plan is None:
                agreed.plan = state.decide(read)
            step = state.feedback.begin_bucket(read)
            with step.outcome:
                if buffer.numel() == 0:
                    return completed_future(buffer)
                if agreed.plan is None:
                    return start_mean(group, buffer).then(_count_when_done(state, step, group, buffer))
                prepared = state.average.prepare(step, agreed.plan, read.owners, [buffer])
                return _submit_average(state, f"{name}:average_bucket_{read.number}", prepared, step, buffer)
        except Exception as error:  # noqa: BLE001 - raised here, any would leave DDP in the middle of a pass
            state.fail(error)
            return failed_future(error, buffer)


class _ReadBucket:
    """The parts of a bucket, which is asked for them once: torch makes new objects each time."""

    def __init__(self, number: int, values: torch.Tensor, owners: list[torch.Tensor]) -> None:
        self.number, self.values, self.owners = number, values, owners

    def index(self) -> int:
        return self.number

    def buffer(self) -> torch.Tensor:
        return self.values

    def parameters(self) -> list[torch.Tensor]:
        return self.owners


def check_buffer(hook: str, bucket: GradBucket) -> torch.Tensor:
    """Return a bucket's buffer.

    Raises:
        TypeError: The bucket is not of a floating-point dtype; or it is none, but a gradient of DDP's Python
            reducer.
    """
    if is_pair(bucket):
        raise TypeError(
            f"{hook} averages buckets, and DDP's Python reducer has none: set "
            "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
        )
    buffer = bucket.buffer()
    check_gradient_dtype(buffer)
    return buffer


def _submit_average(
    state: AveragingState, title: str, prepared: Prepared, step: Step, buffer: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Submit the average of a bucket. Its job holds no state: see :class:`Average`."""
    average, outcome, worker = state.average, step.outcome, state.worker

    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        with outcome:
            average.run(private_group, Values([buffer]), prepared)
        return buffer

    def job_in_parts(private_group: dist.ProcessGroup) -> Parts[torch.Tensor]:
        with outcome:
            yield from average.run_in_parts(private_group, Values([buffer]), prepared)
        return buffer

    if prepared.in_parts:
        return worker.submit_in_parts(job_in_parts, device=buffer.device, name=title)
    return worker.submit(job, device=buffer.device, name=title)


def start_mean(group: dist.ProcessGroup, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Start to average a bucket without compression, a dense one in place; return a future of the mean.

    A sparse one is averaged here, and what fails is raised.
    """
    if buffer.is_sparse:
        return completed_future(sparse_mean(group, buffer))
    # Real numbers: an infinity would make a complex one's other part NaN.
    flat_real(buffer).div_(group.size())
    work: Any = dist.all_reduce(buffer, group=group, async_op=True)

    def mean(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()  # raises the collective's error
        return buffer

    return future_of_work(work, group, buffer.device).then(mean)


def _count_when_done(
    state: AveragingState, step: Step, group: dist.ProcessGroup, buffer: torch.Tensor
) -> Callable[[torch.futures.Future[torch.Tensor]], torch.Tensor]:
    """Return a callback that counts a bucket that is averaged without compression.

    It holds neither the state nor the group, which Gloo's threads would end if they were the last to drop it.
    """
    counter, outcome, with_feedback = state.counter, step.outcome, state.feedback.wanted
    world_size, nbytes = group.size(), 0 if buffer.is_sparse else buffer.nbytes
    sent, outside = state.average.bytes_of_ring(group, nbytes)

    def note(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        mean = outcome.of(done)
        if with_feedback:
            outcome.look_at(mean)
        counter.add(nbytes, world_size, sent, outside, quantized=False)
        return mean

    return note
