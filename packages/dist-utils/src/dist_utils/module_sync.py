"""The same module on every rank: compared first, then broadcast from one of them."""

from __future__ import annotations

import hashlib
from collections import defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups import GroupLike, collective_device, device_types, global_rank, resolve_group
from dist_utils.torch_compat import all_gather_single

__all__ = [
    "TensorMismatchError",
    "sync_module_states",
    "sync_params_and_buffers",
    "verify_param_shape_across_processes",
]

_ALONE_BYTES = 256 << 10
"""A tensor this large is broadcast by itself, from and into its own memory; copies into a common buffer
cost more than a message of its own from about here on (Gloo on loopback)."""

_IN_FLIGHT = 4
"""Broadcasts under way at once: enough to keep the wire busy, and so many buffers at most."""


class TensorMismatchError(RuntimeError):
    """Ranks hold different numbers of tensors, or tensors of another shape, dtype, stride or kind."""


def verify_param_shape_across_processes(
    process_group: GroupLike,
    tensors: Sequence[torch.Tensor],
    logger: Any = None,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Raise on every rank if the ranks' tensors do not match.

    Compared are their number and each one's shape, dtype, device type, layout, stride and
    ``requires_grad``; not the values.

    Args:
        process_group: The ranks that compare: ``None`` for all, a process group or a 1-D DeviceMesh.
        tensors: This rank's, in the order that should match.
        logger: A ``torch.distributed.Logger`` that is told of a mismatch, as DDP's is.
        names: Of the tensors, for the message. Without them it has their position.

    Raises:
        TensorMismatchError: On every rank, with the same message: the first tensor that differs, and what
            two ranks have there.
        TypeError: Something in ``tensors`` is no tensor.
        ValueError: There are not as many names as tensors, or this rank is not in the group. Both of these
            before communication; the other ranks' call ends at the group's timeout.

    Cost:
        One all-gather of 32 bytes a rank; only if that differs, another one of descriptions.

    Source:
        ``torch.distributed.utils._verify_param_shape_across_processes``, which on a mismatch lets rank 0
        go on, and crashes without tensors.
    """
    group = resolve_group(process_group)
    tensors = list(tensors)
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensors[{position}] is a {type(tensor).__name__}, not a tensor")
    if names is not None and len(names) != len(tensors):
        raise ValueError(f"{len(names)} names for {len(tensors)} tensors")
    if group.size() == 1:
        return
    descriptions = [_description(tensor) for tensor in tensors]
    digest = hashlib.sha256(repr(descriptions).encode()).digest()
    device = collective_device(group)
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(device)
    digests = own.new_empty(group.size() * len(digest))
    all_gather_single(digests, own, group)
    if bool((digests.view(group.size(), -1) == own).all()):
        # All equal to mine: true on one rank if and only if on every rank.
        return
    everyone: list[Any] = [None] * group.size()
    labels = list(names) if names is not None else [""] * len(tensors)
    dist.all_gather_object(everyone, list(zip(labels, descriptions, strict=True)), group)
    message = _first_difference(everyone, dist.get_process_group_ranks(group))
    if logger is not None:
        logger.set_error_and_log(message)
    raise TensorMismatchError(message)


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
    """Give every rank the parameters and buffers that rank ``src`` has.

    Args:
        module: The same architecture on every rank.
        process_group: The ranks that take part: ``None`` for all, a process group or a 1-D DeviceMesh.
        broadcast_bucket_size: Bytes up to which small tensors are put together into one message.
        src: Whose values all get: the rank in the group, not in WORLD, as in PyTorch's function.
        params_and_buffers_to_ignore: Names as in ``named_parameters`` and ``named_buffers``. A tied
            parameter has several; one of them is enough.
        broadcast_buffers: Send buffers, also non-persistent ones, too.
        verify: Compare the modules first (:func:`verify_param_shape_across_processes`). Without it ranks
            whose modules differ get garbage, hang or crash.

    Raises:
        TensorMismatchError: On every rank; nothing has been changed.
        ValueError: ``src`` is no rank of the group, the bucket size is not positive, a parameter is lazy
            and not initialised yet, is on the meta device or where the group's backend cannot send from.
            Before communication.
        RuntimeError: A rank died or did not take part; contents are undefined then.

    Cost:
        The module's bytes, once, from ``src``; up to four buffers of ``broadcast_bucket_size``. Tensors of
        256 KiB and more travel by themselves and are not copied.

    Source:
        ``torch.distributed.utils._sync_module_states``.

    Example:
        >>> sync_module_states(module, None, 250 << 20, 0, ())  # doctest: +SKIP
    """
    named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
    if broadcast_buffers:
        named += module.named_buffers(remove_duplicate=False)
    ignored = {id(tensor) for name, tensor in named if name in params_and_buffers_to_ignore}
    # By identity: a tied tensor once, under its first name.
    states = {id(tensor): (name, tensor) for name, tensor in reversed(named) if id(tensor) not in ignored}
    names, tensors = [list(part) for part in zip(*reversed(states.values()), strict=True)] or ([], [])
    group = _checked_group(process_group, tensors, names, broadcast_bucket_size, src)
    if verify:
        verify_param_shape_across_processes(group, tensors, names=names)
    _broadcast(group, tensors, broadcast_bucket_size, src)


def sync_params_and_buffers(
    process_group: GroupLike, module_states: Sequence[torch.Tensor], broadcast_bucket_size: int, src: int
) -> None:
    """Give every rank the values that rank ``src`` has in a list of tensors. Does not compare them first.

    Args:
        process_group: As in :func:`sync_module_states`.
        module_states: The tensors, in the same order on every rank. Written in place, outside of autograd.
        broadcast_bucket_size: As in :func:`sync_module_states`.
        src: The rank in the group.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`sync_module_states`.

    Source:
        ``torch.distributed.utils._sync_params_and_buffers``.
    """
    tensors = list(module_states)
    names = [f"module_states[{position}]" for position in range(len(tensors))]
    group = _checked_group(process_group, tensors, names, broadcast_bucket_size, src)
    _broadcast(group, tensors, broadcast_bucket_size, src)


def _description(tensor: torch.Tensor) -> str:
    text = f"shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device.type}"
    if tensor.layout == torch.strided:
        text += f", stride {tensor.stride()}"
    else:
        text += f", layout {tensor.layout}"
    return f"{text}, requires_grad {tensor.requires_grad}"


def _first_difference(everyone: list[list[tuple[str, str]]], ranks: list[int]) -> str:
    def at(index: int, position: int) -> str | None:
        return everyone[index][position][1] if position < len(everyone[index]) else None

    position, other = next(
        (position, other)
        for position in range(max(map(len, everyone)))
        for other in range(1, len(everyone))
        if at(other, position) != at(0, position)
    )
    longer = everyone[0 if at(0, position) is not None else other]
    label = longer[position][0]
    what = f"tensor {position}" + (f" ({label})" if label else "")
    sides = [
        f"rank {ranks[index]} has {at(index, position) or 'none there'} ({len(everyone[index])} tensors)"
        for index in (0, other)
    ]
    return f"ranks hold different tensors, first at {what}: {sides[0]}; {sides[1]}"


def _checked_group(
    process_group: GroupLike, tensors: list[Any], names: list[str], bucket_bytes: int, src: int
) -> dist.ProcessGroup:
    group = resolve_group(process_group)
    global_rank(group, src)  # raises if src is out of range
    if bucket_bytes <= 0:
        raise ValueError(f"broadcast_bucket_size must be positive, got {bucket_bytes}")
    served = device_types(group)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if torch.nn.parameter.is_lazy(tensor):
            raise ValueError(f"{name} is not initialised yet: run a forward pass first")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values")
        if tensor.device.type not in served:
            raise ValueError(f"{name} is on {tensor.device}, but the group's backends serve {served} only")
    return group


def _broadcast(group: dist.ProcessGroup, tensors: list[torch.Tensor], bucket_bytes: int, src: int) -> None:
    if group.size() == 1:
        return
    dense = [tensor for tensor in tensors if tensor.layout == torch.strided and tensor.numel()]
    under_way: deque[Iterator[None]] = deque()
    with torch.no_grad():
        for bucket in _buckets(dense, bucket_bytes):
            broadcast = _broadcast_bucket(group, bucket, src)
            next(broadcast)
            under_way.append(broadcast)
            if len(under_way) == _IN_FLIGHT:
                next(under_way.popleft(), None)
        for broadcast in under_way:
            next(broadcast, None)
        for tensor in tensors:
            if tensor.layout != torch.strided:
                _broadcast_sparse(group, tensor, bucket_bytes, src)


def _buckets(tensors: list[torch.Tensor], most_bytes: int) -> Iterator[list[torch.Tensor]]:
    """Group tensors of one dtype and device; by sizes alone, so alike on every rank."""
    filling: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    room: defaultdict[tuple[torch.dtype, torch.device], int] = defaultdict(lambda: most_bytes)
    alone = min(_ALONE_BYTES, most_bytes)
    for tensor in tensors:
        size = tensor.nbytes
        if size >= alone:
            yield [tensor]
            continue
        kind = tensor.dtype, tensor.device
        if size > room[kind]:
            yield filling.pop(kind)
            del room[kind]
        filling[kind].append(tensor)
        room[kind] -= size
    yield from filling.values()


def _broadcast_bucket(group: dist.ProcessGroup, bucket: list[torch.Tensor], src: int) -> Iterator[None]:
    """Broadcast tensors of one dtype in one message, pausing while it is on the wire.

    As bytes, which every backend can send.
    """
    is_source = group.rank() == src
    in_place = len(bucket) == 1 and _is_plain_memory(bucket[0])
    if in_place:
        flat = bucket[0].detach().reshape(-1)
    elif is_source:
        flat = torch.cat([tensor.flatten() for tensor in bucket])
    else:
        flat = bucket[0].new_empty(sum(map(torch.numel, bucket)))
    work: Any = dist.broadcast(flat.view(torch.uint8), global_rank(group, src), group, async_op=True)
    yield

    work.wait()
    if not in_place and not is_source:
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _broadcast_sparse(group: dist.ProcessGroup, tensor: torch.Tensor, bucket_bytes: int, src: int) -> None:
    """Broadcast the parts of a sparse tensor, of which ranks may have different numbers of elements."""
    is_source = group.rank() == src
    parts = _sparse_parts(tensor) if is_source else []
    shapes = [[(part.shape, part.dtype) for part in parts]]
    dist.broadcast_object_list(shapes, global_rank(group, src), group)
    if not is_source:
        parts = [torch.empty(shape, dtype=dtype, device=tensor.device) for shape, dtype in shapes[0]]
    _broadcast(group, parts, bucket_bytes, src)
    if is_source:
        return
    if tensor.layout == torch.sparse_coo:
        indices, values = parts
        tensor.copy_(torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True))
    else:
        compressed, plain, values = parts
        received = torch.sparse_compressed_tensor(
            compressed, plain, values, tensor.shape, layout=tensor.layout
        )
        tensor.resize_as_sparse_(received).copy_(received)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        coalesced = tensor.coalesce()
        return [coalesced.indices(), coalesced.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
