"""The hook that averages gradients as products of factors."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import torch

from ddp_quant_hooks.hook import average_bucket
from ddp_quant_hooks.lowrank.state import LowRankState
from dist_utils.comm_hooks import buckets_only
from dist_utils.torch_compat import GradBucket


@buckets_only
def low_rank_hook(state: LowRankState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket as products of two factors in few bits: for links of 1 Gbit/s and less.

    Each parameter of two and more dimensions is a matrix: its outermost dimension in memory, and the others.
    Its mean is approximated by a product of two factors, of which only the factors are sent; what that leaves
    out is added to the next step's gradient. Biases, and other parameters whose factors would hardly be
    smaller, are sent in few bits with the first factors. Buckets may be as many as DDP makes.

    Args:
        state: Options, residuals, factors and statistics; one state for each model.
        bucket: From DDP. fp32, bf16, fp16 and complex64 are averaged in factors, computed in fp32; sparse,
            fp64 and complex128 buckets, and those below 16 KiB, without compression.

    Returns:
        A future of ``bucket.buffer()`` holding the mean, in its dtype, bitwise identical on all ranks. A
        matrix with a NaN or an infinity on any rank is NaN, and residuals and factors stay what they were
        before that step. At world size 1 and for an empty bucket it is complete, and nothing is sent.

    Raises:
        TypeError: ``state`` is not a state, the bucket is not of a floating-point dtype, or the model is
            compiled with DDP's Python reducer, which hands over no buckets. Before any communication.
        ValueError: This rank is not in the group; before any communication.
        RuntimeError: As for :func:`quantized_allreduce_hook`.

    Cost:
        A matrix of n x m values sends (n + m) ``rank`` numbers of 0.625 bytes (4 bits, and a scale for 32)
        between two hosts, 2 (H - 1) / H times that between H: at rank 8, 0.020 bytes a parameter of 7 million
        in layers of width 384. Two means that follow each other for each bucket.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.powerSGD_hook``.

    Example:
        >>> ddp.register_comm_hook(LowRankState(), low_rank_hook)  # doctest: +SKIP
    """
    if not isinstance(state, LowRankState):
        raise TypeError(f"low_rank_hook needs a LowRankState as its state, got {type(state).__name__}")
    return average_bucket("low_rank_hook", state, bucket)
