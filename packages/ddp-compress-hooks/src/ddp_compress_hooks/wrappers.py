"""Wrappers that let any communication hook work on a 16-bit bucket."""

# No ``from __future__ import annotations`` here: register_comm_hook compares a hook's annotations with
# the real types, and refuses strings.
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ddp_compress_hooks.hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook
from ddp_compress_hooks.state import CompressState, as_state
from dist_utils.comm_hooks import (
    CommHook,
    HookState,
    check_gradient_dtype,
    clamp_mean,
    completed_future,
    failed_future,
    is_pair,
    none_means_world,
    world_by_default,
)
from dist_utils.torch_compat import GradBucket, profiler_range


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that casts the bucket to ``torch.float16``, runs ``hook`` on it, and casts back.

    ``fp16_compress_wrapper(allreduce_hook)`` is :func:`fp16_compress_hook`, which divides before the cast.
    Any other hook gets the gradient itself in fp16, undivided, because only the hook knows how it
    averages. A finite value over 65504 becomes an infinity, which stays visible.

    Args:
        hook: Any hook: one of ours, of PyTorch (powerSGD), or your own. It may return the bucket's
            buffer, a new tensor of the same number of elements, or a list that starts with one.

    Returns:
        A hook that takes the state of ``hook`` as its first argument. Its result is the bucket's original
        buffer, in the original dtype. At world size 1 ``hook`` gets the bucket unchanged; a sparse bucket is
        always left to ``hook``. If the state is a process group, or has one as ``process_group``, its ranks
        compare new buckets before they are cast; with ``None``, those of WORLD do if ``hook`` is ours or
        PyTorch's.

    Raises:
        TypeError: ``hook`` is not callable. The hook itself raises it if the bucket's dtype is not
            floating-point.

    Cost:
        The cost of ``hook``, and a copy of the bucket in fp16.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_wrapper``.

    Example:
        >>> ddp.register_comm_hook(state, fp16_compress_wrapper(powerSGD_hook))  # doctest: +SKIP
    """
    return _compress_wrapper("fp16_compress_wrapper", hook, torch.float16, fp16_compress_hook)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """Return a hook that casts the bucket to ``torch.bfloat16``, runs ``hook`` on it, and casts back.

    bfloat16 has the range of fp32 and 8 bits of precision. ``bf16_compress_wrapper(allreduce_hook)`` is
    :func:`bf16_compress_hook`, which divides before the cast; any other hook gets the undivided gradient.

    Args:
        hook: Any hook: one of ours, of PyTorch (powerSGD), or your own. It may return the bucket's
            buffer, a new tensor of the same number of elements, or a list that starts with one.

    Returns:
        A hook that takes the state of ``hook`` as its first argument; see :func:`fp16_compress_wrapper`.

    Raises:
        TypeError: ``hook`` is not callable. The hook itself raises it if the bucket's dtype is not
            floating-point.

    Cost:
        The cost of ``hook``, and a copy of the bucket in bf16.

    Source:
        ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_wrapper``.

    Example:
        >>> ddp.register_comm_hook(state, bf16_compress_wrapper(powerSGD_hook))  # doctest: +SKIP
    """
    return _compress_wrapper("bf16_compress_wrapper", hook, torch.bfloat16, bf16_compress_hook)


def _compress_wrapper(name: str, hook: CommHook, wire_dtype: torch.dtype, if_allreduce: CommHook) -> CommHook:
    if not callable(hook):
        raise TypeError(f"{name} wraps a communication hook, got {type(hook).__name__}")
    full_name = f"{name}({getattr(hook, '__qualname__', type(hook).__qualname__)})"

    # Instead of a cast around allreduce_hook, the hook that divides before its own cast.
    inner, cast_to = (if_allreduce, None) if hook is allreduce_hook else (hook, wire_dtype)

    def wrapped_hook(hook_state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if is_pair(bucket):
            return _run_on_pair(inner, cast_to, hook_state, bucket)  # type: ignore[return-value]
        with profiler_range(f"{full_name}:bucket_{bucket.index()}"):
            return _run_on_bucket(inner, cast_to, hook_state, bucket, full_name)

    wrapped_hook.__qualname__ = full_name  # DDP logs it
    wrapped_hook.__module__ = str(getattr(hook, "__module__", ""))
    return world_by_default(wrapped_hook) if none_means_world(hook) else wrapped_hook


def _run_on_bucket(
    hook: CommHook, cast_to: torch.dtype | None, hook_state: Any, bucket: GradBucket, name: str
) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    check_gradient_dtype(buffer)
    if cast_to is None or buffer.is_sparse:
        return hook(hook_state, bucket)
    if buffer.numel() == 0:
        return completed_future(buffer)
    state = _state_of(hook, hook_state)
    if _rank_count(state) > 1:
        _require_real(buffer)
        try:
            if isinstance(hook_state, HookState) and (error := hook_state.worker.error) is not None:
                raise error  # noqa: TRY301 - comparing would wait for a lost peer again
            if state is not None:
                state.begin_bucket(name, bucket)
            bucket.set_buffer(buffer.to(cast_to))
        except Exception as error:  # noqa: BLE001 - raised here, it would leave DDP in the middle of a pass
            if isinstance(hook_state, HookState):
                hook_state.fail(error)
            return failed_future(error, buffer)

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        # Into the original buffer; bucket.buffer() is another one by now.
        result = _first(done.value())
        if result is not buffer:
            buffer.copy_(clamp_mean(result.view_as(buffer), buffer.dtype))
        bucket.set_buffer(buffer)
        return buffer

    return hook(hook_state, bucket).then(decompress)


def _run_on_pair(
    hook: CommHook, cast_to: torch.dtype | None, hook_state: Any, pair: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Do the same under ``torch.compile``, with a pair of a gradient and its parameter."""
    gradient, parameter = pair
    inner: Any = pair
    if cast_to is not None and _rank_count(_state_of(hook, hook_state)) > 1:
        check_gradient_dtype(gradient)
        _require_real(gradient)
        inner = (gradient.to(cast_to), parameter)
    return gradient.copy_(clamp_mean(_first(hook(hook_state, inner)), gradient.dtype))


def _require_real(gradient: torch.Tensor) -> None:
    """Raise ``TypeError`` if the gradient is complex, and other 16 bits would not hold it."""
    if gradient.is_complex():
        raise TypeError(
            f"a wrapped hook needs real gradients, got {gradient.dtype}: use the hook without wrapper"
        )


def _first(result: Any) -> torch.Tensor:
    tensor: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
    return tensor


def _rank_count(state: CompressState | None) -> int:
    """Return how many ranks average; of those of an unknown group, at most."""
    return dist.get_world_size() if state is None else state.process_group.size()


def _state_of(hook: CommHook, hook_state: Any) -> CompressState | None:
    """Return the state that compares buckets; ``None`` if that of a foreign hook does not name its group.

    In a state ``process_group=None`` means WORLD, as in PyTorch's. ``None`` as the state of a foreign hook
    says nothing: the hook may know its group.
    """
    if isinstance(hook_state, CompressState):
        return hook_state
    group = getattr(hook_state, "process_group", hook_state)
    is_world = group is None and (hook_state is not None or none_means_world(hook))
    return as_state(group) if is_world or isinstance(group, (dist.ProcessGroup, DeviceMesh)) else None
