"""The kernels as torch operators, ``torch.ops.ddp_quant_hooks``: ``torch.compile`` sees them whole.

All write to tensors that they are given and return nothing. Arguments are checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ddp_quant_hooks import affine
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.chunks import Span, shards
from ddp_quant_hooks.kernels.backends import Outgoing
from ddp_quant_hooks.kernels.choice import backend_for, cuda_kernels_for
from ddp_quant_hooks.messages import Format, Layout

__all__ = ["VALUE_DTYPES", "operators"]

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be encoded and decoded."""

operators: Any = torch.ops.ddp_quant_hooks


def _encode(
    values: torch.Tensor,
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002 - the layout's name for it
    block_size: int,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    layout, device = Layout(format, block_size), values.device
    _check("values", values, VALUE_DTYPES, values.numel(), device)
    _check_residuals(residual, new_residual, values.numel(), device)
    outgoing = []
    for index, (span, message) in enumerate(zip(_shards(values, messages, layout), messages, strict=True)):
        name = "message" if len(messages) == 1 else f"messages[{index}]"
        _check(name, message, (torch.uint8,), layout.message_bytes(len(span)), device)
        part = slice(span.start, span.stop)
        kept = [None if tensor is None else tensor[part] for tensor in (residual, new_residual)]
        if len(span):
            outgoing.append((values[part], Outgoing(message, *kept)))
    if outgoing:
        backend_for(device).encode(outgoing, layout)


def _reduce(
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002
    values: int,
    message: torch.Tensor,
    message_format: Format,
    block_size: int,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    layout, new_layout = Layout(format, block_size), Layout(message_format, block_size)
    device = message.device
    _check_messages(messages, layout, [values] * len(messages), device)
    _check("message", message, (torch.uint8,), new_layout.message_bytes(values), device)
    _check_residuals(residual, new_residual, values, device)
    if values:
        out = Outgoing(message, residual, new_residual)
        backend_for(device).reduce(messages, layout, values, out, new_layout)


def _decode(messages: list[torch.Tensor], format: Format, block_size: int, values: torch.Tensor) -> None:  # noqa: A002
    layout, device = Layout(format, block_size), values.device
    _check("values", values, VALUE_DTYPES, values.numel(), device)
    _check_messages(messages, layout, [values.numel()] * len(messages), device)
    if values.numel():
        backend_for(device).decode([(messages, values)], layout)


def _decode_shards(
    messages: list[torch.Tensor],
    format: Format,  # noqa: A002
    block_size: int,
    values: torch.Tensor,
) -> None:
    layout, device = Layout(format, block_size), values.device
    _check("values", values, VALUE_DTYPES, values.numel(), device)
    spans = _shards(values, messages, layout)
    _check_messages(messages, layout, [len(span) for span in spans], device)
    both = [(message, span) for message, span in zip(messages, spans, strict=True) if len(span)]
    if both:
        wanted = [([message], values[span.start : span.stop]) for message, span in both]
        backend_for(device).decode(wanted, layout)


def _affine_encode(values: torch.Tensor, message: torch.Tensor, channel: int) -> None:
    layout = _affine_layout(values, channel)
    _check_affine_messages([message], layout, values.device)
    kernels = cuda_kernels_for(values.device)
    if kernels is None or values.dtype not in VALUE_DTYPES:
        affine.encode(values, message, layout)
    else:
        kernels.affine_encode(values, message, channel)


def _affine_decode(messages: list[torch.Tensor], channel: int, values: torch.Tensor) -> None:
    layout = _affine_layout(values, channel)
    _check_affine_messages(messages, layout, values.device)
    kernels = cuda_kernels_for(values.device)
    if kernels is None or values.dtype not in VALUE_DTYPES:
        affine.decode_mean(messages, layout, values)
    else:
        kernels.affine_decode(messages, channel, values)


def _shards(values: torch.Tensor, messages: Sequence[torch.Tensor], layout: Layout) -> list[Span]:
    if not messages:
        raise ValueError("there must be at least one message")
    return shards(Span(0, values.numel()), len(messages), layout.block_size)


def _affine_layout(values: torch.Tensor, channel: int) -> AffineLayout:
    _check("values", values, (*VALUE_DTYPES, torch.float64), values.numel(), values.device)
    return AffineLayout(values.numel(), channel, torch.promote_types(values.dtype, torch.float32))


def _check(
    name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], length: int, device: torch.device
) -> None:
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be of {' or '.join(map(str, dtypes))}, got {tensor.dtype}")
    if tensor.dim() != 1 or tensor.numel() != length or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be flat, contiguous and {length} long, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def _check_messages(
    messages: Sequence[torch.Tensor], layout: Layout, values: Sequence[int], device: torch.device
) -> None:
    if not messages:
        raise ValueError("there must be at least one message")
    for index, (message, count) in enumerate(zip(messages, values, strict=True)):
        _check(f"messages[{index}]", message, (torch.uint8,), layout.message_bytes(count), device)


def _check_affine_messages(
    messages: Sequence[torch.Tensor], layout: AffineLayout, device: torch.device
) -> None:
    if not messages:
        raise ValueError("there must be at least one message")
    for index, message in enumerate(messages):
        name = "message" if len(messages) == 1 else f"messages[{index}]"
        _check(name, message, (torch.uint8,), layout.message_bytes, device)
        if message.data_ptr() % layout.dtype.itemsize:
            raise ValueError(f"{name} must start at a multiple of {layout.dtype.itemsize} bytes")


def _check_residuals(
    residual: torch.Tensor | None, new_residual: torch.Tensor | None, length: int, device: torch.device
) -> None:
    for name, tensor in (("residual", residual), ("new_residual", new_residual)):
        if tensor is not None:
            _check(name, tensor, (torch.float32,), length, device)
    if residual is None or new_residual is None:
        return
    if abs(residual.data_ptr() - new_residual.data_ptr()) < residual.nbytes:
        raise ValueError("residual and new_residual must not share memory")


def _on_fake_tensors(*arguments: Any) -> None:
    """Do what every kernel does to shapes: nothing. A tensor without values beside others comes here too."""
    parts = [
        part for argument in arguments for part in (argument if isinstance(argument, list) else [argument])
    ]
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ValueError(f"all tensors must be on {tensors[0].device}, got {tensor.device}")


_LAYOUT = "str format, int block_size"
_MESSAGE = "Tensor(a!) message, str message_format, int block_size"
_RESIDUALS = "Tensor? residual=None, Tensor(b!)? new_residual=None"

for _name, _kernel, _arguments in (
    ("encode", _encode, f"Tensor values, Tensor(a!)[] messages, {_LAYOUT}, {_RESIDUALS}"),
    (
        "reduce",
        _reduce,
        f"Tensor[] messages, str format, SymInt values, {_MESSAGE}, {_RESIDUALS}",
    ),
    ("decode", _decode, f"Tensor[] messages, {_LAYOUT}, Tensor(a!) values"),
    ("decode_shards", _decode_shards, f"Tensor[] messages, {_LAYOUT}, Tensor(a!) values"),
    ("affine_encode", _affine_encode, "Tensor values, Tensor(a!) message, SymInt channel"),
    ("affine_decode", _affine_decode, "Tensor[] messages, SymInt channel, Tensor(a!) values"),
):
    _qualified = f"ddp_quant_hooks::{_name}"
    torch.library.define(_qualified, f"({_arguments}) -> ()")
    torch.library.impl(_qualified, "CompositeExplicitAutograd", _kernel)
    torch.library.register_fake(_qualified, _on_fake_tensors)
