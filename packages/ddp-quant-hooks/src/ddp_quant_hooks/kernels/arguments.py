"""Checks of the kernels' arguments, for every backend, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.wire_format import SCALE_BYTES, Layout

__all__ = [
    "RESIDUAL_DTYPES",
    "check_affine_messages",
    "check_flat",
    "check_messages",
    "check_residuals",
    "present",
    "refuse_overlaps",
    "refuse_written_with_gradient",
    "share_memory",
]

RESIDUAL_DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes of residuals. fp16 lacks the range: rounding errors of small gradients would be zero."""

Named = Mapping[str, Sequence[torch.Tensor | None]]


def check_flat(
    name: str,
    tensor: torch.Tensor,
    dtypes: tuple[torch.dtype, ...],
    length: int,
    device: torch.device,
    alignment: int | None = None,
) -> None:
    """Raise unless ``tensor`` is flat, of this length, on the device, and in memory as kernels read it."""
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.numel() != length or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat, contiguous and {length} long, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    size = tensor.element_size()
    alignment = alignment or size
    # torch looks at the offset in the storage, other backends at the address.
    address, offset = tensor.data_ptr(), tensor.storage_offset() * size
    if address % alignment or offset % alignment:
        raise ValueError(
            f"{name} must start at a multiple of {alignment} bytes in memory and in its storage, "
            f"not {address % alignment} and {offset % alignment} bytes behind one"
        )


def check_messages(
    messages: Sequence[torch.Tensor],
    layout: Layout,
    values: Sequence[int],
    device: torch.device,
    name: str = "messages",
) -> None:
    """Raise unless there are messages, each with the number of values in ``values``."""
    if not messages:
        raise ValueError("there must be at least one message")
    before, size = -1, 0
    for index, (message, count) in enumerate(zip(messages, values, strict=True)):
        if count != before:  # most are alike
            before, size = count, layout.message_bytes(count)
        if not _is_message(message, size, device, SCALE_BYTES):
            check_flat(_place(name, index), message, (torch.uint8,), size, device, SCALE_BYTES)


def check_affine_messages(
    messages: Sequence[torch.Tensor], layout: AffineLayout, device: torch.device
) -> None:
    """Raise unless there are messages of this layout."""
    if not messages:
        raise ValueError("there must be at least one message")
    size, alignment = layout.message_bytes, layout.dtype.itemsize
    for index, message in enumerate(messages):
        if not _is_message(message, size, device, alignment):
            name = "message" if len(messages) == 1 else _place("messages", index)
            check_flat(name, message, (torch.uint8,), size, device, alignment)


def _is_message(tensor: torch.Tensor, length: int, device: torch.device, alignment: int) -> bool:
    """Return quickly whether all is right; :func:`check_flat` says what is wrong."""
    return (
        tensor.dtype is torch.uint8
        and tensor.dim() == 1
        and tensor.numel() == length
        and tensor.is_contiguous()
        and tensor.device == device
        and tensor.data_ptr() % alignment == 0
        and tensor.storage_offset() % alignment == 0
    )


def check_residuals(
    residual: torch.Tensor | None, new_residual: torch.Tensor | None, length: int, device: torch.device
) -> None:
    """Raise unless the given residuals fit the values and each other."""
    for name, tensor in (("residual", residual), ("new_residual", new_residual)):
        if tensor is not None:
            check_flat(name, tensor, RESIDUAL_DTYPES, length, device)
    if residual is not None and new_residual is not None and residual.dtype != new_residual.dtype:
        raise TypeError(
            f"residual and new_residual must be of one dtype, got {residual.dtype} and {new_residual.dtype}"
        )


def present(named: Named) -> list[torch.Tensor]:
    """Return the tensors that are not ``None``."""
    return [tensor for tensors in named.values() for tensor in tensors if tensor is not None]


def share_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether any two of these contiguous tensors have a byte in common."""
    spans = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    spans.sort()
    last_end = 0
    for start, size in spans:
        if size:
            if start < last_end:
                return True
            last_end = start + size
    return False


def refuse_overlaps(written: Named, read: Named) -> None:
    """Raise if memory that is written is also read, or written twice. All tensors are contiguous."""
    spans = [
        (start := tensor.data_ptr(), start + size, writes, name, index)
        for named, writes in ((written, True), (read, False))
        for name, tensors in named.items()
        for index, tensor in enumerate(tensors)
        if tensor is not None and (size := tensor.nbytes)
    ]
    spans.sort()
    last_end, last = 0, ("", 0)  # of all spans so far, the one that ends last
    written_end, last_written = 0, ("", 0)  # of those that are written
    for start, end, writes, name, index in spans:
        reach, other = (last_end, last) if writes else (written_end, last_written)
        if start < reach:
            both = f"{_place(*other)} and {_place(name, index)}"
            raise ValueError(f"{both} must not share memory: a kernel writes one of them")
        if end > last_end:
            last_end, last = end, (name, index)
        if writes and end > written_end:
            written_end, last_written = end, (name, index)


def _place(name: str, index: int) -> str:
    """Return the name of one of an argument's tensors, for errors."""
    return f"{name}[{index}]" if name == "messages" else name


def refuse_written_with_gradient(written: Iterable[torch.Tensor]) -> None:
    """Raise where autograd would not know what was written, as torch's in-place operators do for leaves."""
    if torch.is_grad_enabled():
        for tensor in written:
            if tensor.requires_grad:
                kind = "a leaf" if tensor.is_leaf else "a result"
                raise RuntimeError(
                    f"the kernels write in place and have no gradient, but a tensor of shape "
                    f"{tuple(tensor.shape)} that they would write is {kind} that requires grad: detach it, "
                    "or call them under torch.no_grad()"
                )
