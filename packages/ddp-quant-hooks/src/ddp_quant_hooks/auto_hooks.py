"""The hook for a state that chooses: one bucket, from ``backward()`` to the candidate that averages it."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
import torch

from ddp_quant_hooks.auto_state import AutoState
from dist_utils.comm_hooks import buckets_only, check_gradient_dtype, completed_future, failed_future, is_pair
from dist_utils.torch_compat import GradBucket

__all__ = ["auto_hook"]


@buckets_only
def auto_hook(state: AutoState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket with the candidate that was chosen or, during the trial, whose turn it is.

    Args:
        state: Candidates and choice; one state for each model.
        bucket: From DDP, of a dtype and layout that the candidates accept.

    Returns:
        The candidate's future, or one with its value. At world size 1 it is complete.

    Raises:
        TypeError: ``state`` is not an :class:`AutoState`, the bucket is not of a floating-point dtype, or the
            model is compiled with DDP's Python reducer, which hands over no buckets.
        CandidateError: A candidate raises, during the trial.
        ValueError: This rank is not in the group, or a candidate averages over other ranks.
        RuntimeError: A peer failed, or ranks have other candidates or options; raised by ``backward()``.

    Example:
        >>> ddp.register_comm_hook(AutoState(), auto_hook)  # doctest: +SKIP
    """
    if not isinstance(state, AutoState):
        raise TypeError(f"auto_hook needs an AutoState as its state, got {type(state).__name__}")
    if is_pair(bucket):
        raise TypeError(
            "auto_hook averages buckets, and DDP's Python reducer has none: set "
            "torch._dynamo.config.optimize_ddp to True or 'ddp_optimizer'"
        )
    state.bucket_came()
    buffer = bucket.buffer()
    check_gradient_dtype(buffer)
    if state.process_group.size() == 1:
        return completed_future(buffer)
    state.refuse_capture(buffer)
    try:
        running = state.begin_bucket(bucket)
    except RuntimeError as error:
        return failed_future(error.with_traceback(None), buffer)
    if running.held is not None:
        return running.held.take(bucket)
    return state.passes.average(running, bucket)
