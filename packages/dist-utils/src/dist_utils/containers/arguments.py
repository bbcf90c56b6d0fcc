"""The arguments of a call: moved to a device, cast together, or packed into one flat tuple."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypeVar, overload

import torch
from torch.nn.utils.rnn import PackedSequence

from dist_utils.containers.walk import apply_to_tensors

S = TypeVar("S")
T = TypeVar("T", torch.Tensor, PackedSequence)

Device = torch.device | str | int


@overload
def recursive_to(  # type: ignore[overload-overlap] # a tensor gives a tuple, as in PyTorch
    inputs: T, target_device: Device, use_side_stream_for_tensor_copies: bool
) -> tuple[T]: ...


@overload
def recursive_to(inputs: S, target_device: Device, use_side_stream_for_tensor_copies: bool) -> list[S]: ...


def recursive_to(
    inputs: Any, target_device: Device, use_side_stream_for_tensor_copies: bool
) -> tuple[Any] | list[Any]:
    """Move every tensor in nested containers to a device.

    Args:
        inputs: A tensor or containers, as in :func:`apply_to_tensors`.
        target_device: The device to move to. Without an index: the current one of its type.
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
    if target.type in ("cpu", "meta") and target.index is not None:  # the devices of their tensors have none
        target = torch.device(target.type)
    has_streams = target.type != "cpu" and hasattr(getattr(torch, target.type, None), "current_device")
    beside = use_side_stream_for_tensor_copies and has_streams  # not with MPS; the CPU's do nothing

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == target:
            return tensor
        # The memory of other layouts cannot be kept for the stream that uses the copy.
        plain = tensor.layout is torch.strided and not tensor.is_nested
        if beside and plain and tensor.device.type == "cpu":
            return _copy_beside(tensor, target)
        return tensor.to(target)  # without an index the current device, where it stays the same tensor

    moved = apply_to_tensors(move, inputs)
    return (moved,) if isinstance(inputs, (torch.Tensor, PackedSequence)) else [moved]


def to_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_device: Device,
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


def cast_forward_inputs(
    dtype: torch.dtype | None, /, *args: Any, **kwargs: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Cast every floating-point tensor in the arguments of a call.

    Args:
        dtype: What to cast to; ``None`` for no cast. Positional only, so that the call may have a
            ``dtype=`` of its own.
        *args: Positional arguments, with containers as in :func:`apply_to_tensors`.
        **kwargs: Keyword arguments, likewise.

    Returns:
        ``(args, kwargs)``. Autograd sees the casts. Integer, bool and complex tensors, and tensors that
        have the dtype, are the same objects.

    Raises:
        TypeError: ``dtype`` is not a dtype.
        ValueError: A container contains itself.

    Source:
        ``torch.distributed.utils._cast_forward_inputs``.

    Example:
        >>> cast_forward_inputs(torch.bfloat16, torch.ones(1), ids=torch.tensor([7]))
        ((tensor([1.], dtype=torch.bfloat16),), {'ids': tensor([7])})
    """
    if dtype is None:
        return args, kwargs
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the first argument of cast_forward_inputs must be a dtype, got {dtype!r}")

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, (args, kwargs))


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Put the arguments of a call into one flat tuple, for functions that take positional arguments only.

    Returns:
        ``(flat_args, kwarg_keys)``, the positional arguments followed by the keyword arguments' values, and
        the keyword names in the same order. :func:`unpack_kwargs` is the inverse.

    Source:
        ``torch.distributed.utils._pack_kwargs``.

    Example:
        >>> pack_kwargs(1, 2, a=3)
        ((1, 2, 3), ('a',))
    """
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(
    flat_args: Sequence[Any], kwarg_keys: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Take apart what :func:`pack_kwargs` put together.

    Args:
        flat_args: Positional arguments, then values of keyword arguments.
        kwarg_keys: The names of the last ``len(kwarg_keys)`` of them.

    Returns:
        ``(args, kwargs)``.

    Raises:
        ValueError: There are more names than arguments, or a name occurs twice.

    Source:
        ``torch.distributed.utils._unpack_kwargs``, which drops values under a repeated name.

    Example:
        >>> unpack_kwargs((1, 2, 3), ("a",))
        ((1, 2), {'a': 3})
    """
    if len(kwarg_keys) > len(flat_args):
        raise ValueError(f"{len(kwarg_keys)} keyword names for {len(flat_args)} arguments: {kwarg_keys}")
    if len(set(kwarg_keys)) != len(kwarg_keys):
        raise ValueError(f"a keyword name occurs twice: {kwarg_keys}")
    first = len(flat_args) - len(kwarg_keys)
    return tuple(flat_args[:first]), dict(zip(kwarg_keys, flat_args[first:], strict=True))


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
