"""What hooks and calls on plain tensors get, checked, and the futures that they return."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeGuard, TypeVar, cast

import torch
import torch.distributed as dist

from dist_utils import torch_compat
from dist_utils.module_state.broadcasts import obstacle
from dist_utils.process_groups.jobs import empty_future, fail, new_future
from dist_utils.torch_compat import GradBucket

CommHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
"""What ``register_comm_hook`` takes: ``hook(state, bucket) -> future of the averaged tensor``."""

GRADIENT_DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
)

_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def buckets_only(hook: _Hook) -> _Hook:
    """Let a communication hook raise a helpful error when ``FullyShardedDataParallel`` (FSDP1) calls it.

    FSDP1 passes its hooks a tensor instead of a bucket, and usually a second tensor for the result. A
    decorator; the hook that it returns has the same name and signature.

    Raises:
        TypeError: The returned hook raises it when FSDP1 calls it.
    """

    @functools.wraps(hook)
    def refuse_tensors(*arguments: Any, **named: Any) -> Any:
        if any(isinstance(argument, torch.Tensor) for argument in arguments):
            raise TypeError(
                f"{hook.__name__} averages buckets of DistributedDataParallel, and FullyShardedDataParallel "
                "(FSDP1) has none: use fully_shard (FSDP2), which has options and hooks of its own"
            )
        return hook(*arguments, **named)

    return cast("_Hook", refuse_tensors)


def is_pair(bucket: object) -> TypeGuard[tuple[torch.Tensor, torch.Tensor]]:
    """Return whether a hook's ``bucket`` is really a pair of gradient and parameter.

    A hook gets such a pair under ``torch.compile`` with DDP's Python reducer. It must then change the
    gradient in place, and return it.
    """
    return isinstance(bucket, tuple)


def world_by_default(hook: _Hook) -> _Hook:
    """Declare that a communication hook averages over WORLD if its state is ``None``. A decorator.

    Example:
        >>> @world_by_default
        ... def my_hook(process_group, bucket): ...
        >>> none_means_world(my_hook)
        True
    """
    hook.world_by_default = True  # type: ignore[attr-defined]
    return hook


def none_means_world(hook: object) -> bool:
    """Return whether a hook averages over WORLD if its state is ``None``: as it declares, or if PyTorch's.

    Any other hook may know its group by itself. See :func:`world_by_default`.
    """
    of_torch = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.")
    return of_torch or getattr(hook, "world_by_default", False)


def check_gradient_dtype(gradient: torch.Tensor) -> None:
    """Raise ``TypeError`` unless ``gradient`` has a dtype that can be averaged.

    Those are fp16, bf16, fp32, fp64, complex64 and complex128.
    """
    if gradient.dtype not in GRADIENT_DTYPES:
        raise TypeError(f"a gradient bucket must be of a floating-point dtype, got {gradient.dtype}")


def clamp_mean(mean: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return means of numbers of ``dtype`` that were computed in another dtype, clamped to its range.

    Use it before a cast to ``dtype`` wherever more was rounded than a division and a sum: in bf16 the mean of
    fp16 numbers may be 65536, and what a quantized exchange carries over from the last step may lift a mean
    above every value. Infinities and NaN stay.

    Args:
        mean: Of a floating-point dtype; if complex, of one with the range of ``dtype``.
        dtype: The dtype of the numbers, to which the caller casts.

    Returns:
        ``mean`` itself if its dtype has no wider range.

    Cost:
        Nothing if the range of ``mean.dtype`` is no wider; otherwise a few elementwise kernels.

    Example:
        >>> clamp_mean(torch.tensor([65536.0, float("inf")]), torch.float16).half()
        tensor([65504.,    inf], dtype=torch.float16)
    """
    largest = torch.finfo(dtype).max
    if torch.finfo(mean.dtype).max <= largest:
        return mean
    wide = mean.to(torch.promote_types(mean.dtype, dtype))  # bf16 does not have fp16's largest number
    return torch.where(wide.isinf(), wide, wide.clamp(-largest, largest))


def checked_tensors(call: str, tensor: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a call's tensors, detached, if they can be written in place.

    Args:
        call: The name of the function, for messages.
        tensor: One tensor, or a sequence of them.

    Raises:
        TypeError: ``tensor`` is neither, or a tensor is sparse or not of a floating-point dtype.
        ValueError: A tensor is part of a graph or inside a transform of ``torch.func``, which would not see
            the change; or it holds no memory, like a ``DTensor``; or it is expanded, or given twice, and
            would be written twice. Other tensors that share memory are not noticed: give one of them.
    """
    tensors: Any = [tensor] if isinstance(tensor, torch.Tensor) else tensor
    if not isinstance(tensors, Sequence) or not all(isinstance(one, torch.Tensor) for one in tensors):
        raise TypeError(f"{call} takes a tensor or a sequence of tensors, got {_kinds_of(tensor)}")
    for number, one in enumerate(tensors):
        what = "the tensor" if one is tensor else f"tensor {number}"
        if one.layout is not torch.strided or one.is_nested or one.dtype not in GRADIENT_DTYPES:
            kind = "nested tensor" if one.is_nested else f"{one.layout} tensor"
            raise TypeError(
                f"{call}: {what} must be dense and of a floating-point dtype, got a {kind} of {one.dtype}"
            )
        if why := _why_not_writable(one):
            raise ValueError(f"{call}: {what} {why}")
    begins = [one.data_ptr() for one in tensors if one.numel()]
    if len(set(begins)) < len(begins):
        raise ValueError(f"{call}: two of the tensors share memory: they begin at the same address")
    return [one.detach() for one in tensors]


def checked_operation(call: str, op: Any) -> bool:
    """Return whether ``op`` is the mean (``True``) or the sum (``False``).

    Raises:
        TypeError: ``op`` is not a reduce operation.
        ValueError: It is another operation.
    """
    if not isinstance(op, (dist.ReduceOp, dist.ReduceOp.RedOpType)):
        raise TypeError(f"{call}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op!r}")
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"{call}: op must be ReduceOp.SUM or ReduceOp.AVG, got {op}")
    return bool(op == dist.ReduceOp.AVG)


def same_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the indices of all nonempty tensors by dtype and device.

    The kinds come in the order in which they first appear.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(index)
    return list(kinds.values())


def _why_not_writable(one: torch.Tensor) -> str:
    if one.requires_grad and not one.is_leaf:
        return "is part of a graph, which would not see that it changes: give its detach()"
    if transformed := torch_compat.transformed_as(one):
        return f"is {transformed}, inside a transform, which would not see that it changes"
    if one.is_inference():
        return "was made in inference mode and cannot be written outside of it: give a clone"
    return obstacle(one)


def _kinds_of(given: object) -> str:
    if isinstance(given, Sequence) and not isinstance(given, str):
        kinds = sorted({type(one).__name__ for one in given})
        return f"a {type(given).__name__} of {', '.join(kinds)}"
    return f"a {type(given).__name__}"


def completed_future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that is complete, for a hook that has nothing to average."""
    future = empty_future(buffer.device)
    future.set_result(buffer)
    return future


def joined_future(
    parts: Sequence[torch.futures.Future[Any]], value: _T, device: torch.device
) -> torch.futures.Future[_T]:
    """Return a future of ``value`` that is complete when all parts are, or raises the first error of one.

    ``torch.futures.collect_all`` makes a future without devices: who waits for it on an accelerator does not
    wait for the streams of its parts.

    Args:
        parts: At least one; they complete on any thread.
        value: The future's value.
        device: Where the tensors are that the parts write.
    """
    joined, result = new_future(device)

    def finish(_: torch.futures.Future[Any]) -> None:
        try:
            for part in parts:
                part.wait()  # the current stream waits, which the future records below
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits must have it
            fail(joined, error)
        else:
            joined.set_result(value)

    torch.futures.collect_all(list(parts)).then(finish)
    return result


def failed_future(error: Exception, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """Return a future that raises ``error`` when waited for. A hook should return it instead of raising.

    An error raised in the hook itself would leave DDP in the middle of a pass.

    Args:
        error: What ``backward()`` raises.
        buffer: The bucket's buffer.
    """

    def fail(_: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        raise error

    return completed_future(buffer).then(fail)
