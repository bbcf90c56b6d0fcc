"""The hooks: the way of one bucket from ``backward()`` to the averaged gradient."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import torch

from ddp_compress_hooks import graph
from ddp_compress_hooks.averaging import start_sum
from ddp_compress_hooks.state import CompressState, GroupOrState, as_state
from dist_utils.comm_hooks import (
    buckets_only,
    check_gradient_dtype,
    completed_future,
    failed_future,
    is_pair,
    sparse_mean,
    world_by_default,
)
from dist_utils.torch_compat import GradBucket, profiler_range


@world_by_default
@buckets_only
def allreduce_hook(process_group: GroupOrState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in its own dtype, as DDP does without a hook.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, ``None`` for WORLD, or a
            :class:`CompressState` without a wire dtype. With ``accumulate="fp32"``, 16-bit buckets
            are summed in fp32.
        bucket: From DDP: fp16, bf16, fp32, fp64 or complex; dense or sparse.

    Returns:
        A future of ``bucket.buffer()`` holding the mean. At world size 1 and for an empty bucket it is
        complete, and nothing is sent.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group;
            before any communication.
        ValueError: This rank is not in the group, or the state asks for another wire dtype; before any
            communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        One all-reduce; each rank sends ``2 (W - 1) / W`` times the bucket's bytes. For a sparse bucket, with
        every hook here, that of :func:`dist_utils.comm_hooks.sparse_mean`.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook``.

    Example:
        >>> ddp.register_comm_hook(None, allreduce_hook)  # doctest: +SKIP
    """
    return _average("allreduce_hook", as_state(process_group), bucket, None)


@world_by_default
@buckets_only
def compress_hook(process_group: GroupOrState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in the wire dtype of its state.

    Args:
        process_group: Usually a :class:`CompressState`. A process group, a one-dimensional ``DeviceMesh`` or
            ``None`` stands for a state without a wire dtype, which compresses nothing.
        bucket: From DDP: fp16, bf16, fp32, fp64 or complex. A sparse bucket is averaged without compression.

    Returns:
        A future of ``bucket.buffer()``, which holds the mean in the bucket's dtype. At world size 1 and for
        an empty bucket it is complete, and nothing is sent.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group; before
            any communication.
        ValueError: This rank is not in the group; before any communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        Each rank sends ``2 (W - 1) / W`` times the bucket's elements in the wire dtype's size, and takes
        memory for them.

    Example:
        >>> state = CompressState(wire_dtype=torch.bfloat16, accumulate="fp32")  # doctest: +SKIP
        >>> ddp.register_comm_hook(state, compress_hook)  # doctest: +SKIP
    """
    state = as_state(process_group)
    return _average("compress_hook", state, bucket, state.wire_dtype)


@world_by_default
@buckets_only
def fp16_compress_hook(process_group: GroupOrState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in ``torch.float16``: half the bytes of fp32, 11 bits of precision, up to 65504.

    The gradient is divided by the world size before it is cast, so a value overflows to infinity only if
    a rank's share of the mean does (or, with ``accumulate="wire"``, a partial sum of shares of values over
    65504).

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, ``None`` for WORLD, or a
            :class:`CompressState` whose ``wire_dtype`` is ``None`` or ``torch.float16``.
        bucket: From DDP: fp16, bf16, fp32, fp64 or complex. A sparse bucket is averaged without compression.

    Returns:
        A future of ``bucket.buffer()``, which holds the mean in the bucket's dtype.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group; before
            any communication.
        ValueError: This rank is not in the group, or the state asks for another wire dtype; before any
            communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        Half the bytes of fp32: each rank sends ``2 (W - 1) / W`` times 2 bytes per value. 2 bytes per value
        of memory.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook``.

    Example:
        >>> ddp.register_comm_hook(None, fp16_compress_hook)  # doctest: +SKIP
    """
    return _average("fp16_compress_hook", as_state(process_group), bucket, torch.float16)


@world_by_default
@buckets_only
def bf16_compress_hook(process_group: GroupOrState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in ``torch.bfloat16``: half the bytes of fp32, 8 bits of precision, the same range.

    Works wherever the backend sums bfloat16, Gloo included.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, ``None`` for WORLD, or a
            :class:`CompressState` whose ``wire_dtype`` is ``None`` or ``torch.bfloat16``.
        bucket: From DDP: fp16, bf16, fp32, fp64 or complex. A sparse bucket is averaged without compression.

    Returns:
        A future of ``bucket.buffer()``, which holds the mean in the bucket's dtype.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group; before
            any communication.
        ValueError: This rank is not in the group, or the state asks for another wire dtype; before any
            communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        Half the bytes of fp32: each rank sends ``2 (W - 1) / W`` times 2 bytes per value. 2 bytes per value
        of memory.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook``.

    Example:
        >>> ddp.register_comm_hook(None, bf16_compress_hook)  # doctest: +SKIP
    """
    return _average("bf16_compress_hook", as_state(process_group), bucket, torch.bfloat16)


# Without NCCL, register_comm_hook refuses any function named bf16_compress_hook. DDP logs, and pickle stores,
# the __qualname__, which stays.
bf16_compress_hook.__name__ = "bf16_compress"


def _average(
    name: str, state: CompressState, bucket: GradBucket, wire_dtype: torch.dtype | None
) -> torch.futures.Future[torch.Tensor]:
    """Average ``bucket`` in ``wire_dtype`` (``None``: its own dtype).

    Returns a future of the buffer; under ``torch.compile``, where nobody waits, the gradient.
    """
    if state.wire_dtype not in (None, wire_dtype):
        sent = "gradients as they are" if wire_dtype is None else wire_dtype
        raise ValueError(f"{name} sends {sent}, but the state's wire_dtype is {state.wire_dtype}")
    group = state.process_group
    if is_pair(bucket):
        gradient, _ = bucket
        check_gradient_dtype(gradient)
        return graph.average(state, group, gradient, wire_dtype)  # type: ignore[return-value]

    with profiler_range(f"{name}:bucket_{bucket.index()}"):
        buffer = bucket.buffer()
        check_gradient_dtype(buffer)
        try:
            if group.size() == 1 or buffer.numel() == 0:
                state.bucket_came()
                return completed_future(buffer)
            state.begin_bucket(name, bucket)
            if buffer.is_sparse:
                return completed_future(sparse_mean(group, buffer))
            job_name = f"{name}:average_bucket_{bucket.index()}"
            return start_sum(state, buffer, wire_dtype, divisor=group.size(), name=job_name)
        except Exception as error:  # noqa: BLE001 - raised here, it would leave DDP in the middle of a pass
            state.fail(error)
            return failed_future(error, buffer)
