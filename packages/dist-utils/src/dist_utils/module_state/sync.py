"""Make a module identical on all ranks: compare the ranks first, then broadcast from one of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.module_state.broadcasts import broadcast_tensors, require_sendable
from dist_utils.process_groups.groups import GroupLike, resolve_group
from dist_utils.process_groups.matching_tensors import TensorClaim, require_same_tensors


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
        broadcast_bucket_size: The most bytes of one message; less than 256 KiB counts as 256 KiB.
        src: The rank whose values are sent: its rank in the group, not in WORLD, as in PyTorch's function.
        params_and_buffers_to_ignore: Names as in ``named_parameters`` and ``named_buffers``. A tied
            parameter has several; one of them is enough.
        broadcast_buffers: Also send buffers, non-persistent ones included.
        verify: First make sure that all ranks can take part, call with equal arguments and have tensors of
            the same names and kinds. Without it ranks that differ get garbage, hang or crash. Whether tensors
            share memory with others is not compared.

    Raises:
        TensorMismatchError: On every rank; nothing has been changed.
        TypeError, ValueError: An argument or a tensor is unusable here: ``src`` is not a rank of the group,
            the bucket size is not a positive number, a tensor is not initialized, on the meta device,
            freed, expanded, of a layout, dtype or class (``DTensor``) that cannot be sent, or on a device
            that the group's backends do not send from. With ``verify`` the other ranks get a
            ``TensorMismatchError`` that says so.
        RuntimeError: A rank died or did not take part; contents are undefined then.

    Cost:
        The module's bytes, once, from ``src``; meanwhile a copy of all tensors that are smaller than 256 KiB
        or not contiguous. With ``verify`` also what ``verify_param_shape_across_processes`` costs.

    Source:
        ``torch.distributed.utils._sync_module_states``, which does not compare, and fails on sparse and
        8-bit floating-point buffers.

    Example:
        >>> sync_module_states(module, None, 250 << 20, 0, ())  # doctest: +SKIP
    """

    def collect() -> tuple[list[str], list[torch.Tensor]]:
        return _contents(module, params_and_buffers_to_ignore, broadcast_buffers=broadcast_buffers)

    _sync(process_group, collect, broadcast_bucket_size, src, verify=verify)


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
        broadcast_bucket_size: The most bytes of one message; less than 256 KiB counts as 256 KiB.
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

    def collect() -> tuple[list[str], list[torch.Tensor]]:
        tensors = list(module_states)
        return [f"module_states[{index}]" for index in range(len(tensors))], tensors

    _sync(process_group, collect, broadcast_bucket_size, src, verify=verify)


def _sync(
    process_group: GroupLike,
    collect: Callable[[], tuple[list[str], list[torch.Tensor]]],
    bucket_bytes: int,
    src: int,
    *,
    verify: bool,
) -> None:
    """Compare what all ranks have collected, and broadcast it."""
    group = resolve_group(process_group)
    tensors: list[torch.Tensor] = []
    claim, problem = TensorClaim([]), None
    try:
        names, tensors = collect()
        _require_arguments(group, bucket_bytes, src)
        require_sendable(group, names, tensors)
        if verify:
            arguments = f"broadcast_bucket_size {bucket_bytes!r}, src {src!r}"
            claim = TensorClaim.of(tensors, names, arguments)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        problem = error
    if verify:
        require_same_tensors(group, claim, problem)
    elif problem is not None:
        raise problem
    broadcast_tensors(group, tensors, bucket_bytes, src)


def _contents(
    module: torch.nn.Module, params_and_buffers_to_ignore: Container[str], *, broadcast_buffers: bool
) -> tuple[list[str], list[torch.Tensor]]:
    """Return the names and tensors that a module holds: each tensor once, with all its names."""
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module")
    # A string contains every part of a name, and an iterator would be used up by the first name.
    ignore: Any = params_and_buffers_to_ignore
    if isinstance(ignore, str) or not hasattr(ignore, "__contains__"):
        kind = type(ignore).__name__
        raise TypeError(f"params_and_buffers_to_ignore must be a collection, not one string, got a {kind}")
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    if broadcast_buffers:
        named += module.named_buffers(remove_duplicate=False)
    ignored = {id(tensor) for name, tensor in named if name in params_and_buffers_to_ignore}
    names: dict[int, str] = {}  # by identity
    for name, tensor in named:
        before = names.get(id(tensor))
        names[id(tensor)] = name if before is None else f"{before} = {name}"
    tensors = {id(tensor): tensor for _, tensor in named if id(tensor) not in ignored}
    return [names[key] for key in tensors], list(tensors.values())


def _require_arguments(group: dist.ProcessGroup, bucket_bytes: Any, src: Any) -> None:
    if not isinstance(bucket_bytes, int) or not isinstance(src, int):
        raise TypeError(f"broadcast_bucket_size and src must be integers, got {bucket_bytes!r} and {src!r}")
    if bucket_bytes <= 0:
        raise ValueError(f"broadcast_bucket_size must be positive, got {bucket_bytes}")
    if not 0 <= src < group.size():
        raise ValueError(f"src {src} is out of range for a group of {group.size()} ranks")
