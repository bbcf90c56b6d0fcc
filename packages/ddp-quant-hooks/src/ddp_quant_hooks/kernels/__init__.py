"""Quantise, average and restore values in blocks: one interface, several backends, the same bits."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.kernels.cpu import LIBRARY_VARIABLE, CpuKernels, library_path
from ddp_quant_hooks.messages import Layout

__all__ = ["VALUE_DTYPES", "Backend", "backend_for", "decode", "describe", "encode", "reduce"]

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What can be encoded and decoded."""


class Backend(Protocol):
    """What a backend provides; its arguments have been checked."""

    def encode(
        self,
        values: torch.Tensor,
        message: torch.Tensor,
        layout: Layout,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor | None,
    ) -> None:
        """See :func:`encode`."""

    def reduce(
        self,
        messages: list[torch.Tensor],
        layout: Layout,
        values: int,
        message: torch.Tensor,
        message_layout: Layout,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor | None,
    ) -> None:
        """See :func:`reduce`."""

    def decode(self, messages: list[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
        """See :func:`decode`."""


@cache
def _cpu_kernels() -> CpuKernels | OSError:
    try:
        return CpuKernels()
    except OSError as error:
        return error


def backend_for(device: torch.device) -> Backend:
    """Return what computes on tensors of ``device``."""
    compiled = _cpu_kernels()
    if device.type == "cpu" and isinstance(compiled, CpuKernels):
        return compiled
    return torch_ops


def describe() -> str:
    """Say which backend computes on which device, and why.

    Example:
        >>> print(describe())  # doctest: +SKIP
        cpu: compiled kernels with AVX-512 (of AVX-512, AVX2, SSE2), 2 threads
        other devices: torch operators
    """
    compiled = _cpu_kernels()
    if isinstance(compiled, CpuKernels):
        sets, threads = ", ".join(compiled.available), torch.get_num_threads()
        cpu = f"compiled kernels with {compiled.instruction_set} (of {sets}), {threads} thread(s)"
    elif library_path().exists():
        cpu = f"torch operators, 20 to 40 times slower: the compiled kernels do not load here: {compiled}"
    elif LIBRARY_VARIABLE in os.environ:
        cpu = f"torch operators, 20 to 40 times slower: {LIBRARY_VARIABLE} names no file: {library_path()}"
    else:
        cpu = (
            "torch operators, 20 to 40 times slower: this installation has no compiled kernels; install a "
            "C++ compiler, then: pip install --force-reinstall --no-deps --no-binary ddp-quant-hooks "
            "ddp-quant-hooks"
        )
    return f"cpu: {cpu}\nother devices: torch operators"


def encode(
    values: torch.Tensor,
    message: torch.Tensor,
    layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantise values to a message.

    Each block is divided by its largest magnitude and rounded to the nearest number of the format. A
    block with a NaN or an infinity gets the scale NaN.

    Args:
        values: Flat and contiguous; fp32, bf16 or fp16.
        message: Where to; uint8, ``layout.message_bytes(values.numel())`` long.
        layout: Of the message.
        residual: Added to the values first; fp32, as long as they.
        new_residual: Where to write what the message loses of the sum; fp32, no memory in common with
            ``residual``. For a block that is not finite, ``residual`` again, or zero.

    Raises:
        TypeError, ValueError: A tensor has the wrong dtype, length or device, or gaps.
    """
    _check("values", values, VALUE_DTYPES, values.numel(), values.device)
    _check("message", message, (torch.uint8,), layout.message_bytes(values.numel()), values.device)
    _check_residuals(residual, new_residual, values.numel(), values.device)
    backend_for(values.device).encode(values, message, layout, residual, new_residual)


def reduce(
    messages: Sequence[torch.Tensor],
    layout: Layout,
    values: int,
    message: torch.Tensor,
    message_layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantise the mean of several messages' values anew.

    The mean is in fp32, in the order of ``messages``. A block that is not finite in one of them is NaN.

    Args:
        messages: At least one, from :func:`encode`.
        layout: Of ``messages``.
        values: How many values are in each.
        message: Where to; uint8. It may be one of ``messages`` if the layouts are equal.
        message_layout: Of ``message``; the same block size as ``layout``.
        residual: As for :func:`encode`, of the mean.
        new_residual: As for :func:`encode`.

    Raises:
        TypeError, ValueError: As :func:`encode`; or no message, or unequal block sizes.
    """
    _check_messages(messages, layout, values, message.device)
    if layout.block_size != message_layout.block_size:
        raise ValueError(
            f"the block sizes must be equal, got {layout.block_size} and {message_layout.block_size}"
        )
    _check("message", message, (torch.uint8,), message_layout.message_bytes(values), message.device)
    _check_residuals(residual, new_residual, values, message.device)
    backend = backend_for(message.device)
    backend.reduce(list(messages), layout, values, message, message_layout, residual, new_residual)


def decode(messages: Sequence[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
    """Restore the mean of one or more messages' values.

    Args:
        messages: At least one, from :func:`encode` or :func:`reduce`.
        layout: Of ``messages``.
        values: Where to; flat and contiguous; fp32, bf16 or fp16.

    Raises:
        TypeError, ValueError: As :func:`encode`; or no message.
    """
    _check("values", values, VALUE_DTYPES, values.numel(), values.device)
    _check_messages(messages, layout, values.numel(), values.device)
    backend_for(values.device).decode(list(messages), layout, values)


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
    messages: Sequence[torch.Tensor], layout: Layout, values: int, device: torch.device
) -> None:
    if not messages:
        raise ValueError("there must be at least one message")
    for index, message in enumerate(messages):
        _check(f"messages[{index}]", message, (torch.uint8,), layout.message_bytes(values), device)


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
