"""The kernels as torch operators, ``torch.ops.ddp_quant_hooks``: ``torch.compile`` sees them whole.

All write to tensors that they are given and return nothing. Arguments are checked here, and autograd is told
of every write: a tensor that requires grad is refused while gradients are recorded, and versions count up.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ddp_quant_hooks import affine
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.chunks import shard_lengths
from ddp_quant_hooks.kernels.arguments import (
    Named,
    check_affine_messages,
    check_flat,
    check_messages,
    check_residuals,
    present,
    refuse_overlaps,
    refuse_written_with_gradient,
    share_memory,
)
from ddp_quant_hooks.kernels.backends import Outgoing
from ddp_quant_hooks.kernels.choice import backend_for, cuda_kernels_for
from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.wire_format import Format, Layout

__all__ = ["VALUE_DTYPES", "operators"]

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that can be encoded and decoded."""

_AFFINE_DTYPES = (*VALUE_DTYPES, torch.float64)

operators: Any = torch.ops.ddp_quant_hooks


def _encode(
    values: torch.Tensor,
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002 - the layout's name for it
    block_size: int,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    rotate: bool = False,
) -> None:
    layout, device, length = _layout(format, block_size, rotate), values.device, values.numel()
    check_flat("values", values, VALUE_DTYPES, length, device)
    check_residuals(residual, new_residual, length, device)
    lengths = _lengths_of_shards(length, messages, layout)
    name = "message" if len(messages) == 1 else "messages"
    check_messages(messages, layout, lengths, device, name)
    _claim(
        {"messages": messages, "new_residual": [new_residual]}, {"values": [values], "residual": [residual]}
    )
    if not length:
        return
    backend = backend_for(device)
    if isinstance(backend, CudaKernels):
        backend.encode_parts(values, lengths, messages, layout, residual, new_residual)
    else:
        before, after = _cut_if_there(residual, lengths), _cut_if_there(new_residual, lengths)
        parts = zip(_cut(values, lengths), map(Outgoing, messages, before, after), lengths, strict=True)
        backend.encode([(part, out) for part, out, count in parts if count], layout)


def _reduce(
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002
    values: int,
    message: torch.Tensor,
    message_format: Format,
    block_size: int,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    rotate: bool = False,
    message_rotate: bool = False,
) -> None:
    layout = _layout(format, block_size, rotate)
    new_layout = _layout(message_format, block_size, message_rotate)
    device = message.device
    if values < 0:
        raise ValueError(f"values must be at least 0, got {values}")
    check_messages(messages, layout, [values] * len(messages), device)
    check_messages([message], new_layout, [values], device, "message")
    check_residuals(residual, new_residual, values, device)
    read: list[torch.Tensor | None] = [*messages]
    if layout == new_layout:  # a block is read before it is written
        start = message.data_ptr()
        read = [None if other.data_ptr() == start else other for other in messages]
    _claim({"message": [message], "new_residual": [new_residual]}, {"messages": read, "residual": [residual]})
    if values:
        out = Outgoing(message, residual, new_residual)
        backend_for(device).reduce(messages, layout, values, out, new_layout)


def _decode(
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002
    block_size: int,
    values: torch.Tensor,
    rotate: bool = False,
) -> None:
    layout, device, length = _layout(format, block_size, rotate), values.device, values.numel()
    check_flat("values", values, VALUE_DTYPES, length, device)
    check_messages(messages, layout, [length] * len(messages), device)
    _claim({"values": [values]}, {"messages": messages})
    if length:
        backend_for(device).decode([(messages, values)], layout)


def _decode_shards(
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002
    block_size: int,
    values: torch.Tensor,
    rotate: bool = False,
) -> None:
    layout, device, length = _layout(format, block_size, rotate), values.device, values.numel()
    check_flat("values", values, VALUE_DTYPES, length, device)
    lengths = _lengths_of_shards(length, messages, layout)
    check_messages(messages, layout, lengths, device)
    _claim({"values": [values]}, {"messages": messages})
    if not length:
        return
    backend = backend_for(device)
    if isinstance(backend, CudaKernels):
        backend.decode_parts(messages, lengths, layout, values)
    else:
        parts = zip(messages, _cut(values, lengths), lengths, strict=True)
        backend.decode([([message], part) for message, part, count in parts if count], layout)


def _affine_encode(values: torch.Tensor, message: torch.Tensor, channel: int) -> None:
    layout = _affine_layout(values, channel)
    check_affine_messages([message], layout, values.device)
    _claim({"message": [message]}, {"values": [values]})
    kernels = cuda_kernels_for(values.device)
    if kernels is None or values.dtype not in VALUE_DTYPES:
        affine.encode(values, message, layout)
    else:
        kernels.affine_encode(values, message, channel)


def _affine_decode(messages: list[torch.Tensor], channel: int, values: torch.Tensor) -> None:
    layout = _affine_layout(values, channel)
    check_affine_messages(messages, layout, values.device)
    _claim({"values": [values]}, {"messages": messages})
    kernels = cuda_kernels_for(values.device)
    if kernels is None or values.dtype not in VALUE_DTYPES:
        affine.decode_mean(messages, layout, values)
    else:
        kernels.affine_decode(messages, channel, values)


def _claim(written: Named, read: Named) -> None:
    """Refuse what must not be written, and tell autograd of the rest: it does not see compiled kernels."""
    tensors = present(written)
    if share_memory(tensors + present(read)):  # allowed if it is only read
        refuse_overlaps(written, read)
    refuse_written_with_gradient(tensors)
    # A tensor of inference mode has no version.
    torch.autograd.graph.increment_version([tensor for tensor in tensors if not tensor.is_inference()])


# Made and checked once, not at every call. There are a few hundred layouts of blocks, and more of channels.
_layout = functools.cache(Layout)
_kept_affine_layout = functools.lru_cache(1024)(AffineLayout)


def _lengths_of_shards(length: int, messages: Sequence[torch.Tensor], layout: Layout) -> list[int]:
    if not messages:
        raise ValueError("there must be at least one message")
    if len(messages) == 1:
        return [length]
    return shard_lengths(length, len(messages), layout.block_size)


def _cut(tensor: torch.Tensor, lengths: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return a part of each length."""
    return [tensor] if len(lengths) == 1 else tensor.split_with_sizes(lengths)


def _cut_if_there(tensor: torch.Tensor | None, lengths: Sequence[int]) -> Sequence[torch.Tensor | None]:
    return [None] * len(lengths) if tensor is None else _cut(tensor, lengths)


def _affine_layout(values: torch.Tensor, channel: int) -> AffineLayout:
    length, dtype = values.numel(), values.dtype
    check_flat("values", values, _AFFINE_DTYPES, length, values.device)
    return _kept_affine_layout(length, channel, torch.float64 if dtype == torch.float64 else torch.float32)


def _fake(written: tuple[int, ...]) -> Callable[..., None]:
    """Return a kernel for tensors without values; ``written``: positions of the arguments that it writes."""

    def check(*arguments: Any) -> None:
        # A mix of tensors with and without values comes here too.
        tensors = _tensors_of(arguments)
        for tensor in tensors:
            if tensor.device != tensors[0].device:
                raise ValueError(f"all tensors must be on {tensors[0].device}, got {tensor.device}")
        refuse_written_with_gradient(
            _tensors_of([arguments[place] for place in written if place < len(arguments)])
        )

    return check


def _tensors_of(arguments: Iterable[Any]) -> list[torch.Tensor]:
    parts = [
        part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])
    ]
    return [part for part in parts if isinstance(part, torch.Tensor)]


_LAYOUT = "str format, int block_size"
_MESSAGE = "Tensor(a!) message, str message_format, int block_size"
_RESIDUALS = "Tensor? residual=None, Tensor(b!)? new_residual=None"
_ROTATE = "bool rotate=False"
_ROTATIONS = f"{_ROTATE}, bool message_rotate=False"

for _name, _kernel, _written, _arguments in (
    ("encode", _encode, (1, 5), f"Tensor values, Tensor(a!)[] messages, {_LAYOUT}, {_RESIDUALS}, {_ROTATE}"),
    (
        "reduce",
        _reduce,
        (3, 7),
        f"Tensor[] messages, str format, SymInt values, {_MESSAGE}, {_RESIDUALS}, {_ROTATIONS}",
    ),
    ("decode", _decode, (3,), f"Tensor[] messages, {_LAYOUT}, Tensor(a!) values, {_ROTATE}"),
    ("decode_shards", _decode_shards, (3,), f"Tensor[] messages, {_LAYOUT}, Tensor(a!) values, {_ROTATE}"),
    ("affine_encode", _affine_encode, (1,), "Tensor values, Tensor(a!) message, SymInt channel"),
    ("affine_decode", _affine_decode, (2,), "Tensor[] messages, SymInt channel, Tensor(a!) values"),
):
    _qualified = f"ddp_quant_hooks::{_name}"
    torch.library.define(_qualified, f"({_arguments}) -> ()")
    torch.library.impl(_qualified, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_qualified, _fake(_written))
