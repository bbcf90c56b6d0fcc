"""Broadcast many tensors: small ones together, large ones in their own memory, sparse ones in parts."""

from __future__ import annotations

import contextlib
import operator
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups.groups import global_rank
from dist_utils.process_groups.plain_data import all_gather_plain
from dist_utils.process_groups.terms import AgreementError
from dist_utils.torch_compat import private

__all__ = ["are_ordinary", "broadcast_tensors", "why_not_sendable"]

_ALONE_BYTES = 256 << 10
"""A tensor this large is broadcast by itself, from and into its own memory; copies into a common buffer
cost more than a message of its own from about here on (Gloo on loopback)."""

_IN_FLIGHT = 4
"""Broadcasts under way at once: enough to keep the wire busy. Also the maximum number of buffers."""

_ORDINARY_TYPES = frozenset((torch.nn.Parameter, torch.Tensor))
_ORDINARY_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64))

_DTYPE, _IS_NESTED, _LAYOUT = (operator.attrgetter(name) for name in ("dtype", "is_nested", "layout"))

_SPARSE_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_SPARSE_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


def why_not_sendable(tensor: torch.Tensor) -> str | None:
    """Return why :func:`broadcast_tensors` cannot send or receive a tensor, or ``None`` if it can."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialized yet: run a forward pass first"
    if tensor.is_nested or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = "nested tensor" if tensor.is_nested else type(tensor).__name__
        return f"is a {kind}, whose memory its class handles: synchronize the tensors inside"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.is_quantized or not _can_copy(tensor.dtype):
        return f"has dtype {tensor.dtype}, which cannot be copied"
    if tensor.layout is torch.strided:
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            return "has no memory: its storage has been freed"
        shared = not tensor.is_contiguous() and _shares_elements(tensor)
        return "is expanded: several of its elements are one in memory" if shared else None
    if tensor.layout not in (torch.sparse_coo, *_SPARSE_ROWS, *_SPARSE_COLUMNS):
        return f"has layout {tensor.layout}, which cannot be sent"
    if tensor.is_inference():  # torch cannot write it in any mode
        return "is sparse and was made in inference mode: make it outside of that"
    if tensor.layout == torch.sparse_coo and tensor.dtype.itemsize == 1 and not tensor.is_coalesced():
        return f"is not coalesced, and {tensor.dtype} cannot be"
    return None


def are_ordinary(tensors: list[Any]) -> bool:
    """Return whether all are tensors of the usual kinds, which can be sent.

    Each property is checked for all tensors before the next one: half a microsecond for each tensor, a fifth
    of the time of checking tensor by tensor.
    """
    return (
        _ORDINARY_TYPES.issuperset(map(type, tensors))
        and _ORDINARY_DTYPES.issuperset(map(_DTYPE, tensors))
        and not any(map(_IS_NESTED, tensors))
        and set(map(_LAYOUT, tensors)) <= {torch.strided}
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.storage_offset, tensors))  # an offset hides freed memory
        and all(map(torch.Tensor.data_ptr, tensors))  # 0: freed or meta
    )


def broadcast_tensors(
    group: dist.ProcessGroup, tensors: list[torch.Tensor], bucket_bytes: int, src: int
) -> None:
    """Give every rank the values of group rank ``src``, in place and outside of autograd.

    Args:
        group: The ranks.
        tensors: Of the same kinds on every rank, and sendable.
        bucket_bytes: The most bytes of small tensors that share one message.
        src: The rank in the group.
    """
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
    """Group tensors of one dtype and device, by sizes alone: identical groups on all ranks."""
    alone = min(_ALONE_BYTES, most_bytes)
    small: list[torch.Tensor] = []
    together = 0
    for tensor in tensors:
        if (size := tensor.nbytes) >= alone:
            yield [tensor]
        else:
            small.append(tensor)
            together += size
    kinds = {tensor.dtype for tensor in small}, {tensor.device for tensor in small}
    if together <= most_bytes and all(len(kind) == 1 for kind in kinds):  # the usual case
        yield small
        return
    filling: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    room: defaultdict[tuple[torch.dtype, torch.device], int] = defaultdict(lambda: most_bytes)
    for tensor in small:
        kind = tensor.dtype, tensor.device
        if tensor.nbytes > room[kind]:
            yield filling.pop(kind)
            del room[kind]
        filling[kind].append(tensor)
        room[kind] -= tensor.nbytes
    yield from filling.values()


def _broadcast_bucket(group: dist.ProcessGroup, bucket: list[torch.Tensor], src: int) -> Iterator[None]:
    """Broadcast tensors of one dtype in one message, pausing while it is on the wire.

    It is sent as bytes, which every backend can send.
    """
    is_source = group.rank() == src
    in_place = len(bucket) == 1 and _is_plain_memory(bucket[0])
    if in_place:
        flat = bucket[0].detach().flatten()
    elif is_source:
        flat = torch.cat([tensor.flatten() for tensor in bucket])
    else:
        flat = bucket[0].new_empty(sum(map(torch.numel, bucket)))
    work: Any = dist.broadcast(flat.view(torch.uint8), global_rank(group, src), group, async_op=True)
    yield

    work.wait()
    if is_source:
        return
    if in_place:
        if not bucket[0].is_inference():  # autograd would not notice that the memory was written
            torch.autograd.graph.increment_version(bucket[0])
        return
    # Autograd counts the writes. Tensors made in inference mode can be written only in that mode.
    with torch.inference_mode() if any(map(torch.is_inference, bucket)) else contextlib.nullcontext():
        _copy_flat(flat, bucket)


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _shares_elements(tensor: torch.Tensor) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


@cache
def _can_copy(dtype: torch.dtype) -> bool:
    """Return whether torch can copy a dtype: some integers of fewer than 8 bits it can only name."""
    try:
        two, one = (torch.empty(length, dtype=dtype, device="cpu") for length in (2, 1))
        two[::2].copy_(one)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _broadcast_sparse(group: dist.ProcessGroup, tensor: torch.Tensor, bucket_bytes: int, src: int) -> None:
    """Broadcast the parts of a sparse tensor; ranks may hold different numbers of elements."""
    is_source = group.rank() == src
    parts = _sparse_parts(tensor) if is_source else []
    described = all_gather_plain(group, [(list(part.shape), str(part.dtype)) for part in parts])[src]
    if not is_source:
        parts = _room_for(described, tensor)
    broadcast_tensors(group, parts, bucket_bytes, src)
    if is_source:
        return
    # Torch checks only on request that indices are in range; otherwise this writes out of bounds. And without
    # a device it takes the default one, not that of the parts.
    checked: Any = {"device": tensor.device, "check_invariants": True}
    if tensor.layout == torch.sparse_coo:
        indices, values = parts
        received = torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True, **checked)
        tensor.copy_(received)
    else:
        compressed, plain, values = parts
        received = torch.sparse_compressed_tensor(
            compressed, plain, values, tensor.shape, layout=tensor.layout, **checked
        )
        tensor.resize_as_sparse_(received).copy_(received)


def _room_for(described: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Allocate the parts of a sparse tensor as the source has described them.

    Raises:
        AgreementError: The description is invalid.
    """
    dtypes = {str(dtype): dtype for dtype in (torch.int64, torch.int32, tensor.dtype)}
    count = 2 if tensor.layout == torch.sparse_coo else 3
    try:
        rooms = [torch.empty(shape, dtype=dtypes[dtype], device=tensor.device) for shape, dtype in described]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise AgreementError(f"the source of a sparse tensor describes it as {described!r:.200}") from error
    if len(rooms) != count:
        raise AgreementError(f"the source of a sparse tensor sends {len(rooms)} parts, not {count}")
    return rooms


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    if tensor.layout == torch.sparse_coo:
        coalesced = tensor.coalesce()
        return [coalesced.indices(), coalesced.values()]
    if tensor.layout in _SPARSE_ROWS:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def _copy_flat(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Copy a flat tensor's parts into tensors, one after the other, in two calls for all.

    One by one it takes three times as long. No public names for them up to torch 2.15.
    """
    purpose = "synchronizing the state of modules"
    parts = private("torch._utils", "_unflatten_dense_tensors", purpose)(flat, tensors)
    if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors):  # which _foreach_copy_ does not handle
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part)
    else:
        private("torch", "_foreach_copy_", purpose)(tensors, parts)
