"""Move nested containers to another device; copies to an accelerator may overlap its computation."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from dist_utils.containers.apply import apply_to_tensors
from dist_utils.torch_compat import is_accelerator

__all__ = ["recursive_to", "to_kwargs"]

S = TypeVar("S")
T = TypeVar("T", torch.Tensor, PackedSequence)


@overload
def recursive_to(  # type: ignore[overload-overlap] # a tensor gives a tuple, as in PyTorch
    inputs: T, target_device: torch.device | str | int, use_side_stream_for_tensor_copies: bool
) -> tuple[T]: ...


@overload
def recursive_to(
    inputs: S, target_device: torch.device | str | int, use_side_stream_for_tensor_copies: bool
) -> list[S]: ...


def recursive_to(
    inputs: Any, target_device: torch.device | str | int, use_side_stream_for_tensor_copies: bool
) -> tuple[Any] | list[Any]:
    """Move every tensor in nested containers to a device.

    Args:
        inputs: A tensor or containers, as in :func:`apply_to_tensors`.
        target_device: The device to move to.
        use_side_stream_for_tensor_copies: Copy from the CPU to an accelerator on a stream of its own, so that
            the copies overlap what the accelerator is computing. The current stream waits for them. Tensors
            in pinned memory are copied without blocking the CPU: do not overwrite them before the copy is
            done.

    Returns:
        ``(moved,)`` for a tensor or ``PackedSequence``, else ``[moved]``. Always one entry, because PyTorch's
        callers expect one per device. Whatever is on the device already is the same object.

    Raises:
        ValueError: A container contains itself.

    Cost:
        One copy per tensor that is elsewhere. No communication.

    Source:
        ``torch.distributed.utils._recursive_to``, which leaves dataclasses, sets and deques behind and
        never uses its side stream.

    Example:
        >>> (moved,) = recursive_to([torch.zeros(2)], "meta", False)
        >>> moved[0].device
        device(type='meta')
    """
    target = torch.device(target_device)
    beside = use_side_stream_for_tensor_copies and _has_streams(target)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        if beside and tensor.device.type == "cpu":
            return _copy_beside(tensor, target)
        return tensor.to(target)

    moved = apply_to_tensors(move, inputs)
    return (moved,) if isinstance(inputs, (torch.Tensor, PackedSequence)) else [moved]


def to_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_device: torch.device | str | int,
    use_side_stream_for_tensor_copies: bool,
) -> tuple[tuple[tuple[Any, ...]], tuple[dict[str, Any]]]:
    """Move the arguments of a call to a device.

    Args:
        inputs: The positional arguments.
        kwargs: The keyword arguments, or ``None``.
        target_device: As in :func:`recursive_to`.
        use_side_stream_for_tensor_copies: As in :func:`recursive_to`.

    Returns:
        ``((args,), (kwargs,))``, always exactly one call, even without arguments.

    Source:
        ``torch.distributed.utils._to_kwargs``, which returns two empty tuples for a call without arguments.

    Example:
        >>> to_kwargs((), None, "cpu", False)
        (((),), ({},))
    """
    # Together, so that what both share stays shared.
    ((args, named),) = recursive_to(
        (tuple(inputs), {} if kwargs is None else kwargs), target_device, use_side_stream_for_tensor_copies
    )
    return (args,), (named,)


def _has_streams(device: torch.device) -> bool:
    module = torch.get_device_module(device) if is_accelerator(device) else None
    # MPS has none of them.
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream", "current_device"))


@cache
def _copy_stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


def _copy_beside(tensor: torch.Tensor, target: torch.device) -> torch.Tensor:
    accelerator: Any = torch.get_device_module(target)
    if target.index is None:
        target = torch.device(target.type, accelerator.current_device())  # type: ignore[unreachable] # it can
    stream, current = _copy_stream(target), accelerator.current_stream(target)
    with accelerator.stream(stream):
        moved = tensor.to(target, non_blocking=tensor.is_pinned())
    # The caller uses the copy on the current stream, which waits for it here. The memory belongs to the copy
    # stream, and must not be reused before the current stream is done with it.
    current.wait_stream(stream)
    moved.record_stream(current)
    return moved
