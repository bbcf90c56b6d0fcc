"""The main hook: what happens to one bucket, from ``backward()`` to the averaged gradient."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
from functools import partial
from typing import cast

import torch
import torch.distributed as dist

from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks.averaging import average
from ddp_quant_hooks.passes import BackwardPass
from ddp_quant_hooks.resume import Bucket
from ddp_quant_hooks.state import QuantizedAllreduceState
from ddp_quant_hooks.statistics import ring_bytes
from dist_utils.comm_hooks import buckets_only, check_gradient_dtype, completed_future, failed_future, is_pair
from dist_utils.torch_compat import GradBucket, profiler_range

__all__ = ["quantized_allreduce_hook"]


@buckets_only
def quantized_allreduce_hook(
    state: QuantizedAllreduceState, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with 8 or 4 bits a value on the wire.

    Values are cut into blocks. A block is sent as small integers and one fp32 scale, its largest magnitude.
    The mean is computed in fp32. With three or more ranks, one rank computes the mean of each shard and sends
    it, quantized again, to the others. Some chunks of the bucket are sent while others are computed.

    Args:
        state: Options, residuals and statistics; one state for each model.
        bucket: From DDP. fp32, bf16, fp16 and complex64 are quantized; sparse, fp64 and complex128
            buckets, and those below ``state.min_bytes``, are averaged without compression.

    Returns:
        A future of ``bucket.buffer()`` holding the mean, in its dtype, bitwise identical on all ranks. A
        block with a NaN or an infinity on any rank is NaN. At world size 1 and for an empty bucket it is
        complete, and nothing is sent.

    Raises:
        TypeError: ``state`` is not a state, the bucket is not of a floating-point dtype, or the model is
            compiled with DDP's Python reducer, which hands over no buckets. Before any communication.
        ValueError: This rank is not in the group; before any communication.
        RuntimeError: A peer failed; raised by ``backward()``, or by the next one if the peer had already sent
            all that this step needed from it.

    Cost:
        With a block of 128 and 8 bits, 1.03 bytes a value sent per rank at two ranks and 2.06 (W - 1) / W
        from three on: 0.258 of a ring all-reduce in fp32 at any world size. Scratch memory for a few chunks:
        of 1.3 million values up to five ranks, of more in proportion to the peers, at most of 8.4 million.
        2 (W - 1) messages for each chunk, fewer in levels: see ``levels`` of the state.

    Example:
        >>> ddp.register_comm_hook(QuantizedAllreduceState(), quantized_allreduce_hook)  # doctest: +SKIP
    """
    if not isinstance(state, QuantizedAllreduceState):
        raise TypeError(
            "quantized_allreduce_hook needs a QuantizedAllreduceState as its state, "
            f"got {type(state).__name__}"
        )
    if is_pair(bucket):
        raise TypeError(
            "quantized_allreduce_hook averages buckets, and DDP's Python reducer has none: set "
            "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
        )
    state.bucket_came()
    with profiler_range(f"quantized_allreduce_hook:bucket_{bucket.index()}"):
        buffer = bucket.buffer()
        check_gradient_dtype(buffer)
        state.refuse_capture(buffer)
        if state.process_group.size() == 1:
            return completed_future(buffer)
        running = state.feedback.begin_bucket(bucket, partial(_average, state), state.wait_for_jobs)
        try:
            state.agree(bucket)
        except RuntimeError as error:
            return failed_future(error, buffer)
        if running.held is not None:
            return running.held.take(bucket)
        return _average(state, running, bucket)


def _average(
    state: QuantizedAllreduceState, running: BackwardPass, bucket: Bucket
) -> torch.futures.Future[torch.Tensor]:
    """Decide on a bucket of a backward pass, average it, and count it."""
    buffer = bucket.buffer()
    if buffer.numel() == 0:
        return completed_future(buffer)
    group = state.process_group
    world_size = group.size()
    decision = state.decisions.decide(group, running, bucket)
    with_feedback = state.error_feedback != "none"
    if not decision.quantized:
        nbytes = buffer.numel() * buffer.element_size()
        bytes_sent = 0 if buffer.is_sparse else ring_bytes(nbytes, world_size)
        counter, outcome = state.counter, running.outcome

        def note(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            mean = outcome.of_mean(done) if with_feedback else done.value()
            counter.add(nbytes, world_size, bytes_sent, quantized=False)
            return mean

        return allreduce_hook(group, cast("GradBucket", bucket)).then(note)

    def job(private_group: dist.ProcessGroup) -> torch.Tensor:
        with running.outcome.watching():
            failed = running.outcome.not_finite if with_feedback else None
            sent, error = average(private_group, decision, state.route, failed)
            state.counter.add(buffer.nbytes, world_size, sent, quantized=True, error=error)
        return buffer

    name = f"quantized_allreduce_hook:average_bucket_{bucket.index()}"
    return state.worker.submit(job, device=buffer.device, name=name)
