"""Broadcast many tensors: small ones together, large ones in their own memory, sparse ones in parts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
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

_ORDINARY_DTYPES = {torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool}
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
        for obstacle, stands_in in _OBSTACLES.items():
            if stands_in(tensor):
                raise ValueError(f"{name} {obstacle.format(tensor)}")
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
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]
    small = [tensor for tensor in dense if not _is_sent_alone(tensor)]
    # Autograd is off, but versions are counted, and tensors made in this mode can be written.
    with torch.inference_mode():
        under_way = []
        for tensor in filter(_is_sent_alone, dense):
            flat = _flat(tensor)
            octets = flat.view(torch.uint8)  # which every backend can send
            starts = range(0, octets.numel(), most)
            works = [group.broadcast(octets[start : start + most], src) for start in starts]
            under_way.append((tensor, flat, works))
        if small:
            _broadcast_together(group, small, most, src)
        for tensor, flat, works in under_way:
            for work in works:
                work.wait()
            if group.rank() != src:
                _write(tensor, flat)
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            _broadcast_sparse(group, tensor, bucket_bytes, src)


def _is_sent_alone(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is not sent together with others of its kind; the same on all ranks."""
    return tensor.nbytes >= _ALONE_BYTES or tensor.dtype not in _ORDINARY_DTYPES


def _broadcast_together(
    group: dist.ProcessGroup, tensors: list[torch.Tensor], bucket_bytes: int, src: int
) -> None:
    """Broadcast small tensors in common memory. No public name for it up to torch 2.15."""
    broadcast = private("torch.distributed", "_broadcast_coalesced", "module sync")
    resolved = [tensor.resolve_neg() for tensor in tensors]  # the same object, but for a few
    # It cannot copy a single tensor with unusual strides of dimensions of length 1 into itself.
    flat = [values.view(-1) if values.is_contiguous() else values for values in resolved]
    broadcast(group, flat, bucket_bytes, src)
    for tensor, values in zip(tensors, resolved, strict=True):
        if values is not tensor:
            tensor.copy_(values)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values one after the other, in its own memory if possible."""
    flat = tensor.resolve_conj().resolve_neg().flatten()
    # A slice may have gaps between its elements, and a single element any stride.
    return flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)


def _write(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    """Give a tensor the values that have arrived, and let autograd count that."""
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))
    elif not tensor.is_inference():  # written by the backend, which autograd does not notice
        torch.autograd.graph.increment_version(tensor)


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


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether a dense tensor repeats elements by a stride of zero, as ``expand`` makes it."""
    return tensor.layout is torch.strided and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _has_own_dispatch(tensor: torch.Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _is_opaque(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided and tensor.layout not in _SPARSE_PARTS


def _is_sparse_inference(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided and tensor.is_inference()


def _is_freed(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.untyped_storage().nbytes()


_OBSTACLES: dict[str, Callable[[torch.Tensor], bool]] = {
    "is not initialized yet: run a forward pass first": torch.nn.parameter.is_lazy,
    "is a nested tensor: synchronize the tensors inside": operator.attrgetter("is_nested"),
    "is a {0.__class__.__name__}, whose memory its class handles": _has_own_dispatch,
    "is on the meta device and has no values": operator.attrgetter("is_meta"),
    "is quantized and cannot be copied": operator.attrgetter("is_quantized"),
    "has layout {0.layout}, which cannot be sent": _is_opaque,
    "is sparse and was made in inference mode, and can never be written": _is_sparse_inference,
    "has no memory: its storage has been freed": _is_freed,
    "is expanded: several of its elements are one in memory": is_expanded,
}
"""Why a tensor cannot be sent or received. Each is asked only if those before it do not apply."""
