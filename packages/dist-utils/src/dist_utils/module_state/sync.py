"""Make a module identical on all ranks: compare the ranks first, then broadcast from one of them."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.module_state.broadcasts import are_ordinary, broadcast_tensors, why_not_sendable
from dist_utils.process_groups.groups import GroupLike, device_types, resolve_group
from dist_utils.process_groups.matching_tensors import TensorClaim, require_same_tensors

__all__ = ["sync_module_states", "sync_params_and_buffers"]


def sync_module_states(
    module: torch.nn.Module,
    process_group: GroupLike,
    broadcast_bucket_size: int,
    src: int,
    params_and_buffers_to_ignore: Container[str],
    broadcast_buffers: bool = True,
    *,
    verify: bool = True,
) -> None:
    """Copy the parameters and buffers of rank ``src`` to every rank.

    Args:
        module: The same architecture on every rank.
        process_group: The ranks that take part: ``None`` for all, a process group or a 1-D DeviceMesh.
        broadcast_bucket_size: Bytes up to which small tensors are put together into one message.
        src: The rank whose values are sent: its rank in the group, not in WORLD, as in PyTorch's function.
        params_and_buffers_to_ignore: Names as in ``named_parameters`` and ``named_buffers``. A tied
            parameter has several; one of them is enough.
        broadcast_buffers: Also send buffers, non-persistent ones included.
        verify: First make sure that all ranks can take part, call with equal arguments and have tensors of
            the same names and kinds, which share memory in the same way. Without it ranks that differ get
            garbage, hang or crash.

    Raises:
        TensorMismatchError: On every rank; nothing has been changed.
        TypeError, ValueError: An argument or a tensor is unusable here: ``src`` is not a rank of the group,
            the bucket size is not a positive number, a tensor is not initialized, on the meta device,
            freed, expanded, of a layout, dtype or class (``DTensor``) that cannot be sent, or on a device
            that the group's backends do not send from. With ``verify`` the other ranks get a
            ``TensorMismatchError`` that says so.
        RuntimeError: A rank died or did not take part; contents are undefined then.

    Cost:
        The module's bytes, once, from ``src``; up to four buffers of ``broadcast_bucket_size``. Contiguous
        tensors of that size, or of 256 KiB and more, are sent by themselves and are not copied.

    Source:
        ``torch.distributed.utils._sync_module_states``, which does not compare, and fails on sparse and
        8-bit floating-point buffers.

    Example:
        >>> sync_module_states(module, None, 250 << 20, 0, ())  # doctest: +SKIP
    """
    held: list[tuple[str, Any]] = []
    problem: Exception | None = None
    try:
        held = _held(module, params_and_buffers_to_ignore, broadcast_buffers=broadcast_buffers)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    names, tensors = [name for name, _ in held], [tensor for _, tensor in held]
    _sync(process_group, tensors, names, broadcast_bucket_size, src, problem, verify=verify)


def _held(
    module: torch.nn.Module, params_and_buffers_to_ignore: Container[str], *, broadcast_buffers: bool
) -> list[tuple[str, torch.Tensor]]:
    """Return what a module holds, each tensor once, with all its names."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    if isinstance(params_and_buffers_to_ignore, str):  # a string contains every part of a name
        raise TypeError("params_and_buffers_to_ignore must be a collection of names, not one string")
    # An iterator would be used up by the first name.
    if not hasattr(params_and_buffers_to_ignore, "__contains__"):
        kind = type(params_and_buffers_to_ignore).__name__
        raise TypeError(f"params_and_buffers_to_ignore must be a collection of names, got {kind}")
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    if broadcast_buffers:
        named += module.named_buffers(remove_duplicate=False)
    if len({id(tensor) for _, tensor in named}) == len(named):  # nothing is tied, the usual case
        return [(name, tensor) for name, tensor in named if name not in params_and_buffers_to_ignore]
    ignored = {id(tensor) for name, tensor in named if name in params_and_buffers_to_ignore}
    # By identity: a tied tensor once, under all its names.
    names: dict[int, list[str]] = {}
    tensors: list[torch.Tensor] = []
    for name, tensor in named:
        if id(tensor) in ignored:
            continue
        if id(tensor) not in names:
            names[id(tensor)] = []
            tensors.append(tensor)
        names[id(tensor)].append(name)
    return [(" = ".join(names[id(tensor)]), tensor) for tensor in tensors]


def sync_params_and_buffers(
    process_group: GroupLike,
    module_states: Sequence[torch.Tensor],
    broadcast_bucket_size: int,
    src: int,
    *,
    verify: bool = True,
) -> None:
    """Copy the values of rank ``src`` in a list of tensors to every rank.

    Args:
        process_group: ``None`` for all ranks, a process group or a 1-D DeviceMesh.
        module_states: The tensors, in the same order on every rank. Written in place, outside of autograd.
        broadcast_bucket_size: Bytes up to which small tensors are put together into one message.
        src: The rank in the group.
        verify: First make sure that all ranks have tensors of the same kinds; see :func:`sync_module_states`.

    Raises:
        TensorMismatchError, TypeError, ValueError, RuntimeError: In the cases of :func:`sync_module_states`.

    Cost:
        As :func:`sync_module_states`.

    Source:
        ``torch.distributed.utils._sync_params_and_buffers``.

    Example:
        >>> sync_params_and_buffers(None, list(model.buffers()), 250 << 20, 0)  # doctest: +SKIP
    """
    tensors: list[Any] = []
    problem: Exception | None = None
    try:
        tensors = list(module_states)
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    names = [f"module_states[{position}]" for position in range(len(tensors))]
    _sync(process_group, tensors, names, broadcast_bucket_size, src, problem, verify=verify)


def _sync(
    process_group: GroupLike,
    tensors: list[Any],
    names: list[str],
    bucket_bytes: int,
    src: int,
    problem: Exception | None,
    *,
    verify: bool,
) -> None:
    group = resolve_group(process_group)
    problem = problem or _problem(group, tensors, names, bucket_bytes, src)
    if verify:
        arguments = f"broadcast_bucket_size {bucket_bytes!r}, src {src!r}"
        claim = TensorClaim([]) if problem is not None else TensorClaim.of(tensors, names, arguments)
        require_same_tensors(group, claim, problem)
    elif problem is not None:
        raise problem
    broadcast_tensors(group, tensors, bucket_bytes, src)


def _problem(
    group: dist.ProcessGroup, tensors: list[Any], names: list[str], bucket_bytes: Any, src: Any
) -> Exception | None:
    """Return what keeps this rank from taking part."""
    for label, value in (("broadcast_bucket_size", bucket_bytes), ("src", src)):
        if not isinstance(value, int) or isinstance(value, bool):
            return TypeError(f"{label} must be an int, got {value!r}")
    if bucket_bytes <= 0:
        return ValueError(f"broadcast_bucket_size must be positive, got {bucket_bytes}")
    if not 0 <= src < group.size():
        return ValueError(f"src {src} is out of range for a group of {group.size()} ranks")
    served = device_types(group)
    if are_ordinary(tensors) and all(device.type in served for device in {one.device for one in tensors}):
        return None
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            return TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if (reason := why_not_sendable(tensor)) is not None:
            return ValueError(f"{name} {reason}")
        if tensor.device.type not in served:
            return ValueError(f"{name} is on {tensor.device}, but the group's backends serve {served} only")
    return None
