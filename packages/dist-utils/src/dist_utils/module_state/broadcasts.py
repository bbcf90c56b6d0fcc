"""Broadcast many tensors: small ones together, large ones in their own memory, sparse ones in parts."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dist_utils.process_groups.groups import device_types
from dist_utils.torch_compat import private

_ALONE_BYTES = 256 << 10
"""A tensor this large is broadcast by itself, from and into its own memory; copies into a common buffer
cost more than a message of its own from about here on (Gloo on loopback)."""

_SPARSE_PARTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}

_ORDINARY_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64}
_KIND = operator.attrgetter("dtype", "device", "layout", "is_nested")


def require_sendable(group: dist.ProcessGroup, names: Sequence[str], tensors: Sequence[Any]) -> None:
    """Raise unless :func:`broadcast_tensors` can send and receive all tensors.

    Raises:
        TypeError, ValueError: The first tensor that it cannot send, and why.
    """
    served = device_types(group)
    if _are_ordinary(tensors, served):
        return
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
        if why := obstacle(tensor):
            raise ValueError(
                f"{name} {why}. What need not be sent can be named in params_and_buffers_to_ignore of "
                "sync_module_states"
            )
        if tensor.device.type not in served:
            raise ValueError(f"{name} is on {tensor.device}, but the group's backends serve {served} only")
        # Torch can name more dtypes than it can copy, and coalesce fewer still.
        torch.empty(1, dtype=tensor.dtype, device="cpu").clone()
        if tensor.layout is not torch.strided:
            _sparse_parts(tensor)


def _are_ordinary(tensors: Sequence[Any], served: Sequence[str]) -> bool:
    """Return whether nothing can be wrong with any of the tensors, at half a microsecond for each."""
    return (
        set(map(type, tensors)) <= {torch.nn.Parameter, torch.Tensor}
        and all(
            dtype in _ORDINARY_DTYPES and device.type in served and layout is torch.strided and not nested
            for dtype, device, layout, nested in set(map(_KIND, tensors))
        )
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.storage_offset, tensors))  # an offset hides freed memory
        and all(map(torch.Tensor.data_ptr, tensors))  # 0: freed or meta
    )


def broadcast_tensors(
    group: dist.ProcessGroup, tensors: Sequence[torch.Tensor], bucket_bytes: int, src: int
) -> None:
    """Give every rank the values of group rank ``src``, in place and outside of autograd.

    Args:
        group: The ranks.
        tensors: Of the same kinds on every rank, and sendable.
        bucket_bytes: The most bytes of one message, if that is more than 256 KiB.
        src: The rank in the group.
    """
    if group.size() == 1:
        return
    most = max(bucket_bytes, _ALONE_BYTES)
    under_way = []
    # Autograd is off, but versions are counted, and tensors made in this mode can be written.
    with torch.inference_mode():
        for bucket in _buckets(tensors):
            flat = _flat(bucket)
            octets = flat.view(torch.uint8)  # which every backend can send
            starts = range(0, octets.numel(), most)
            works = [group.broadcast(octets[start : start + most], src) for start in starts]
            under_way.append((bucket, flat, works))
        for bucket, flat, works in under_way:
            for work in works:
                work.wait()
            if group.rank() != src:
                _write(bucket, flat)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            _broadcast_sparse(group, tensor, bucket_bytes, src)


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group the dense tensors by what all ranks have alike: large ones alone, small ones by their kind."""
    large: list[list[torch.Tensor]] = []
    small: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        if tensor.layout is torch.strided and (size := tensor.nbytes):
            if size >= _ALONE_BYTES:
                large.append([tensor])
            else:
                small[tensor.dtype, tensor.device].append(tensor)
    return large + list(small.values())


def _flat(bucket: list[torch.Tensor]) -> torch.Tensor:
    """Return the values of a bucket, one after the other: a single tensor's own memory if possible."""
    if len(bucket) == 1:
        return flat_values(bucket[0])
    flat = bucket[0].new_empty(sum(map(torch.Tensor.numel, bucket)))
    return torch.cat([tensor.flatten() for tensor in bucket], out=flat)  # else autocast refuses some dtypes


def flat_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's values, one after the other: its own memory if possible."""
    flat = tensor.resolve_conj().resolve_neg().flatten()
    # A slice may have gaps between its elements, and a single element any stride.
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def _write(bucket: list[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy what has arrived into the tensors, and let autograd count the writes."""
    if flat.data_ptr() == bucket[0].data_ptr():  # written by the backend, which autograd does not notice
        if not bucket[0].is_inference():
            torch.autograd.graph.increment_version(bucket[0])
        return
    # In two calls for all: a third of the time of one by one. No public names for them up to torch 2.15.
    parts = private("torch._utils", "_unflatten_dense_tensors", "module sync")(flat, bucket)
    if any(tensor.is_neg() or tensor.is_conj() for tensor in bucket):
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part)
    else:
        private(torch, "_foreach_copy_", "module sync")(bucket, parts)


def _broadcast_sparse(group: dist.ProcessGroup, tensor: torch.Tensor, bucket_bytes: int, src: int) -> None:
    """Broadcast the parts of a sparse tensor; ranks may hold different numbers of elements."""
    parts = _sparse_parts(tensor)
    lengths = torch.tensor([length for part in parts for length in part.shape], device=tensor.device)
    group.broadcast(lengths, src).wait()
    if group.rank() != src:
        remaining = iter(lengths.tolist())
        parts = [part.new_empty([next(remaining) for _ in part.shape]) for part in parts]
    broadcast_tensors(group, parts, bucket_bytes, src)
    if group.rank() == src:
        return
    # Without a device torch takes the default one, not that of the parts.
    options: Any = {"size": tensor.shape, "device": tensor.device, "check_invariants": True}
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            received = torch.sparse_coo_tensor(parts[0], parts[1], is_coalesced=True, **options)
        else:
            received = torch.sparse_compressed_tensor(
                parts[0], parts[1], parts[2], layout=tensor.layout, **options
            )
        tensor.resize_as_sparse_(received).copy_(received)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    whole = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor
    return [getattr(whole, part)() for part in _SPARSE_PARTS[tensor.layout]]


def obstacle(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be sent from its memory, or written in it, for a message; else nothing."""
    if why := why_unreadable(tensor):
        return why
    dense = tensor.layout is torch.strided
    if tensor.is_quantized:
        return "is quantized and cannot be copied"
    if not dense and tensor.layout not in _SPARSE_PARTS:
        return f"has layout {tensor.layout}, which cannot be sent"
    if not dense and tensor.is_inference():
        return "is sparse and was made in inference mode, and can never be written"
    strides = zip(tensor.shape, tensor.stride(), strict=True) if dense and tensor.numel() else ()
    if any(stride == 0 and size > 1 for size, stride in strides):
        return "is expanded: several of its elements are one in memory"
    return ""


def why_unreadable(tensor: torch.Tensor) -> str:
    """Return why a tensor's values cannot be read from its memory, for a message; else nothing."""
    if torch.nn.parameter.is_lazy(tensor):
        return "is not initialized yet: run a forward pass first"
    if tensor.is_nested:
        return "is a nested tensor: give the tensors inside"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        kind = type(tensor).__name__
        return f"is a {kind}, whose memory its class handles: of a DTensor give its to_local()"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if tensor.layout is torch.strided and tensor.numel() and not _has_memory(tensor):
        return "has no memory: it has been freed, or belongs to a transform of torch.func"
    return ""


def _has_memory(tensor: torch.Tensor) -> bool:
    try:
        return tensor.untyped_storage().nbytes() > 0  # an address hides a freed tensor with an offset
    except RuntimeError:  # of a transform's tensor
        return False
