"""Counterparts of PyTorch's quantization hooks: each rank quantizes its values once and sends them to all."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
from typing import Any

import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.values import flat_real
from ddp_quant_hooks.hook import check_buffer, start_mean
from dist_utils import GroupLike, resolve_group
from dist_utils.comm_hooks import (
    buckets_only,
    completed_future,
    failed_future,
    require_same_bucket,
    world_by_default,
)
from dist_utils.process_groups import future_of_work, record_use
from dist_utils.torch_compat import GradBucket, all_gather_single, profiler_range


@world_by_default
@buckets_only
def quantization_pertensor_hook(
    process_group: GroupLike, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits, with one scale and zero point for each rank's whole bucket.

    Its error grows with the largest gradient of the bucket. See :func:`quantization_perchannel_hook`,
    and :func:`quantized_allreduce_hook`, which sends less.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        bucket: From DDP. A sparse one is averaged without compression.

    Returns:
        A future of ``bucket.buffer()``, which holds the mean of all ranks' quantized values, computed in fp32
        (fp64 for an fp64 bucket), bitwise identical on all ranks. If a value is NaN or infinite on any rank,
        the whole bucket is NaN. At world size 1 and for an empty bucket it is complete, and nothing is sent.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group, or
            the model is compiled with DDP's Python reducer, which hands over no buckets. Before any
            communication.
        ValueError: This rank is not in the group; before any communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        One all-gather; for GPU tensors in a Gloo group the caller waits for it. Every rank sends its values
        to all others: W - 1 bytes a value, against 8 (W - 1) / W of a ring all-reduce in fp32. That is a
        quarter at two ranks, half at four, and more from eight ranks on. W + 1 bytes a value of memory; Gloo
        takes about as much again.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks.quantization_pertensor_hook``. The
        results are equal up to fp32 rounding, except where PyTorch's hook loses gradients below 1e-5 or
        overflows; and they keep the bucket's dtype, where PyTorch's are always fp32.

    Example:
        >>> ddp.register_comm_hook(None, quantization_pertensor_hook)  # doctest: +SKIP
    """
    return _average("quantization_pertensor_hook", process_group, bucket, None)


@world_by_default
@buckets_only
def quantization_perchannel_hook(
    process_group: GroupLike, bucket: GradBucket, bucket_size: int = 512
) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket in 8 bits, with a scale and a zero point for every ``bucket_size`` values.

    Args:
        process_group: A process group, a one-dimensional ``DeviceMesh``, or ``None`` for WORLD.
        bucket: From DDP. A sparse one is averaged without compression.
        bucket_size: Values per channel. (DDP calls a hook with two arguments: register a plain function of
            your own that passes a third.)

    Returns:
        A future of ``bucket.buffer()``, which holds the mean of all ranks' quantized values, bitwise
        identical on all ranks. A NaN or an infinity on any rank makes its channel NaN.

    Raises:
        TypeError: The bucket is not of a floating-point dtype, or ``process_group`` is not a group, or
            the model is compiled with DDP's Python reducer, which hands over no buckets. Before any
            communication.
        ValueError: ``bucket_size`` is less than 1, or this rank is not in the group; before any
            communication.
        RuntimeError: A peer failed; raised by ``backward()``.

    Cost:
        One all-gather of (W - 1) (1 + 8 / ``bucket_size``) bytes a value: more than a ring all-reduce in
        fp32 from eight ranks on.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks.quantization_perchannel_hook``,
        without its extra channel of padding.

    Example:
        >>> ddp.register_comm_hook(None, quantization_perchannel_hook)  # doctest: +SKIP
    """
    if bucket_size < 1:
        raise ValueError(f"bucket_size must be a number of at least 1, got {bucket_size!r}")
    return _average("quantization_perchannel_hook", process_group, bucket, bucket_size)


def _average(
    name: str, process_group: GroupLike, bucket: GradBucket, channel: int | None
) -> torch.futures.Future[torch.Tensor]:
    buffer = check_buffer(name, bucket)
    group = resolve_group(process_group)
    with profiler_range(f"{name}:bucket_{bucket.index()}"):
        if group.size() == 1 or buffer.numel() == 0:
            return completed_future(buffer)
        try:
            require_same_bucket(group, name, {"channel": channel}, bucket)
            if buffer.is_sparse:
                return start_mean(group, buffer)
        except Exception as error:  # noqa: BLE001 - raised here, it would leave DDP in the middle of a pass
            return failed_future(error, buffer)
        values = flat_real(buffer)
        precision = torch.promote_types(values.dtype, torch.float32)
        layout = kernels.AffineLayout(
            values.numel(), values.numel() if channel is None else channel, precision
        )
        message = torch.zeros(layout.message_bytes, dtype=torch.uint8, device=values.device)
        kernels.affine_encode(values, message, layout)
        gathered = message.new_empty(group.size() * message.numel())
        work: Any = all_gather_single(gathered, message, group, async_op=True)
        # One of Gloo's threads may be the last to drop the callback, which must not own the group: the
        # group's end waits for these threads.
        world_size = group.size()

        def restore(done: torch.futures.Future[Any]) -> torch.Tensor:
            done.value()  # raises what the collective raised
            record_use(message)  # a collective that a CUDA graph captures does not keep its input
            kernels.affine_decode(gathered.chunk(world_size), layout, values)
            return buffer

        return future_of_work(work, group, buffer.device).then(restore)
