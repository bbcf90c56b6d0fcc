"""The kernels' functions: each checks its arguments and calls the backend of their device."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from ddp_quant_hooks.kernels import floats, torch_ops
from ddp_quant_hooks.kernels.affine import AffineLayout
from ddp_quant_hooks.kernels.call import (
    VALUE_DTYPES,
    KernelCall,
    check_messages,
    check_tensor,
    mark_written,
    refuse_overlap,
)
from ddp_quant_hooks.kernels.cpu import LIBRARY_VARIABLE, CpuKernels, library_path
from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.kernels.layout import Layout
from ddp_quant_hooks.kernels.low_rank import FactorCall

_log = logging.getLogger(__name__)


class Backend(Protocol):
    """What computes on a device, with the same bits as every other backend. Arguments have been checked."""

    def run(self, call: KernelCall) -> None:
        """Do a call that has values; shards may be empty."""

    def run_on_factors(self, calls: Sequence[FactorCall]) -> None:
        """Do calls on matrices and factors of them, or on factors alone, one after another."""

    def affine_encode(self, values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
        """Write the message of the values."""

    def affine_decode(
        self, messages: Sequence[torch.Tensor], layout: AffineLayout, values: torch.Tensor
    ) -> None:
        """Write the mean of the messages' values."""


# ---- the functions ----


def encode(
    values: torch.Tensor,
    message: torch.Tensor,
    layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
) -> None:
    """Quantize values to a message.

    Each block is divided by its largest magnitude and rounded to the nearest number of the format. A
    block with a NaN or an infinity gets the scale NaN.

    With ``layout.rotate`` a block is rotated first if fewer than a third of its values (8 bits; half, with 4)
    are above a quarter of the largest, and if that makes its step smaller: its values get fixed random signs
    and then the Walsh-Hadamard transform, so that a few large values do not cost the others their accuracy. A
    block is never rotated if one of its values is zero, or if the largest is not between 2^-100 and 2^100.

    Values that become 16-bit floats themselves (see :mod:`ddp_quant_hooks.kernels.floats`) have no blocks.

    Args:
        values: Flat and contiguous; fp32, bf16 or fp16.
        message: The output; uint8, ``layout.message_bytes(values.numel())`` long.
        layout: Of the message.
        residual: Added to the values first; bf16, of the same length.
        new_residual: The output for the rounding error of the sum; bf16, without memory in common with
            ``residual``. For a block that is not finite, ``residual`` again, or zero.

    Raises:
        TypeError, ValueError: A tensor has the wrong dtype, length or device, or gaps; or starts in the
            middle of a number (messages: of four bytes); or what is written shares memory with something
            else. Nothing is written then, whichever backend would run.
        RuntimeError: What would be written requires grad, and gradients are recorded: the kernels have none.
    """
    encode_shards(values, [message], [values.numel()], layout, residual=residual, new_residual=new_residual)


def encode_shards(
    values: torch.Tensor,
    messages: Sequence[torch.Tensor],
    lengths: Sequence[int],
    layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    check: bool = True,
) -> None:
    """Quantize each shard of the values to a message of its own; on a GPU in one launch.

    Args:
        values: As for :func:`encode`.
        messages: The output; one for each shard.
        lengths: How many values each shard has, in the order of the values. Blocks begin anew in each.
        layout: Of the messages.
        residual: As for :func:`encode`, of all values.
        new_residual: As for :func:`encode`, of all values.
        check: Check the tensors, and tell autograd of what is written. Without it they must fit: for callers
            that have laid them out themselves, and for small messages half of the time.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message, or lengths of other values.
    """
    _run(KernelCall(lengths, values, (), layout, messages, layout, residual, new_residual), check=check)


def reduce(
    messages: Sequence[torch.Tensor],
    layout: Layout,
    values: int,
    message: torch.Tensor,
    message_layout: Layout,
    *,
    residual: torch.Tensor | None = None,
    new_residual: torch.Tensor | None = None,
    check: bool = True,
) -> None:
    """Quantize the mean of several messages' values again.

    The mean is computed in fp32, in the order of ``messages``, except that messages with a rotated block come
    first. A block that is not finite in one of them is NaN.

    Args:
        messages: At least one, from :func:`encode`.
        layout: Of ``messages``.
        values: How many values are in each; at least 0.
        message: The output; uint8. It may be one of ``messages`` if the layouts are equal.
        message_layout: Of ``message``; the same block size as ``layout``.
        residual: As for :func:`encode`, of the mean.
        new_residual: As for :func:`encode`.
        check: As for :func:`encode_shards`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message, or unequal block sizes.
    """
    if layout.block_size != message_layout.block_size:
        raise ValueError(
            f"the block sizes must be equal, got {layout.block_size} and {message_layout.block_size}"
        )
    call = KernelCall([values], None, [messages], layout, [message], message_layout, residual, new_residual)
    _run(call, check=check)


def decode(messages: Sequence[torch.Tensor], layout: Layout, values: torch.Tensor) -> None:
    """Restore the mean of one or more messages' values.

    Args:
        messages: At least one, from :func:`encode` or :func:`reduce`.
        layout: Of ``messages``.
        values: The output; flat and contiguous; fp32, bf16 or fp16.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`; or no message.
    """
    decode_shards([messages], [values.numel()], layout, values)


def decode_shards(
    messages: Sequence[Sequence[torch.Tensor]],
    lengths: Sequence[int],
    layout: Layout,
    values: torch.Tensor,
    *,
    check: bool = True,
) -> None:
    """Restore values shard by shard, each the mean of its messages' values; on a GPU in one launch.

    Args:
        messages: For each shard those whose mean it is; the same number for all shards.
        lengths: How many values each shard has, as for :func:`encode_shards`.
        layout: Of ``messages``.
        values: As for :func:`decode`.
        check: As for :func:`encode_shards`.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`decode`; or lengths of other values, or shards with
            different numbers of messages.
    """
    _run(KernelCall(lengths, values, messages, layout, (), layout), check=check)


def _run(call: KernelCall, *, check: bool = True) -> None:
    if check:
        call.begin()
    if call.layout.dtype is not None or call.new_layout.dtype is not None:
        floats.run(call)
    elif any(call.lengths):
        backend_for(call.device).run(call)


def not_finite(
    messages: Sequence[torch.Tensor], lengths: Sequence[int], layout: Layout, *, check: bool = True
) -> torch.Tensor:
    """Return whether a value that was encoded in any of the messages is not finite, without blocking.

    Args:
        messages: At least one, from :func:`encode` or :func:`reduce`.
        lengths: How many values are in each.
        layout: Of the messages.
        check: As for :func:`encode_shards`.

    Returns:
        A bool without dimensions, on the device of the messages; three launches on a GPU.

    Raises:
        TypeError, ValueError: As :func:`decode`.
    """
    if not messages:
        raise ValueError("there must be at least one message")
    both = [*zip(messages, lengths, strict=True)]
    if check:
        named = [(f"messages[{index}]", *one) for index, one in enumerate(both)]
        check_messages(named, layout, messages[0].device)
    if layout.dtype is not None:
        values = [floats.values_of(message, layout.dtype, length) for message, length in both]
        return ~torch.cat(values).isfinite().all()
    scales = [layout.scales(message, length) for message, length in both]
    return torch.cat(scales).isnan().any()


def affine_encode(values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
    """Quantize values to a message of PyTorch's 8-bit numbers.

    Args:
        values: Flat and contiguous; fp32, bf16, fp16 or fp64.
        message: The output; uint8, ``layout.message_bytes`` long.
        layout: Of the message.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`.
    """
    _check_affine(values, [message], layout, encodes=True)
    if layout.values:
        backend_for(values.device).affine_encode(values, message, layout)


def affine_decode(messages: Sequence[torch.Tensor], layout: AffineLayout, values: torch.Tensor) -> None:
    """Restore the mean of the messages' values. A channel that is not finite on any rank is NaN.

    Args:
        messages: From :func:`affine_encode`.
        layout: Of ``messages``.
        values: The output; flat and contiguous; fp32, bf16, fp16 or fp64.

    Raises:
        TypeError, ValueError, RuntimeError: As :func:`encode`.
    """
    _check_affine(values, messages, layout, encodes=False)
    if layout.values:
        backend_for(values.device).affine_decode(messages, layout, values)


def _check_affine(
    values: torch.Tensor, messages: Sequence[torch.Tensor], layout: AffineLayout, *, encodes: bool
) -> None:
    if values.numel() != layout.values:  # messages of a few more have the same length
        raise ValueError(f"values must be {layout.values} long, as the layout says, got {values.numel()}")
    dtypes = VALUE_DTYPES if layout.dtype == torch.float32 else (torch.float64,)
    check_tensor("values", values, dtypes, (layout.values,), values.device)
    if not messages:
        raise ValueError("there must be at least one message")
    named = [("message" if encodes else f"messages[{index}]", each) for index, each in enumerate(messages)]
    for name, message in named:
        check_tensor(
            name, message, (torch.uint8,), (layout.message_bytes,), values.device, layout.dtype.itemsize
        )
    uses = [("values", values, not encodes), *((name, message, encodes) for name, message in named)]
    refuse_overlap(uses)
    mark_written(uses)


# ---- matrices and their factors ----


def run_on_factors(calls: Sequence[FactorCall], *, check: bool = True) -> None:
    """Do calls on matrices and factors one after another, all of them on one device.

    Args:
        calls: Perhaps none.
        check: As for :func:`encode_shards`; of many small matrices, checks take longer than products.

    Raises:
        TypeError, ValueError: A tensor has another dtype, shape or device than its call asks for, or gaps.
    """
    for call in calls if check else ():
        call.check()
    if calls:
        backend_for(calls[0].device).run_on_factors(calls)


# ---- the backends ----


def backend_for(device: torch.device) -> Backend:
    """Return the backend for tensors of ``device``."""
    found: Backend | str = torch_ops
    if device.type == "cpu":
        found = _cpu_kernels()
    elif device.type == "cuda":
        found = _cuda_kernels(device.index)
    return torch_ops if isinstance(found, str) else found


def describe() -> str:
    """Say which backend computes on the CPU and on the current GPU, and why.

    Example:
        >>> print(describe())  # doctest: +SKIP
        cpu: compiled kernels with AVX-512 (of AVX-512, AVX2, SSE2), 2 thread(s)
        cuda:0: CUDA kernels for sm_90, compiled by NVRTC 13.0
        other devices: torch operators
    """
    on_cpu = _cpu_kernels()
    slow = "torch operators, about ten times slower or more"
    lines = [f"cpu: {slow}: {on_cpu}" if isinstance(on_cpu, str) else f"cpu: {on_cpu.describe()}"]
    if torch.cuda.is_available():
        current = torch.cuda.current_device()
        on_gpu = _cuda_kernels(current)
        text = f"torch operators: {on_gpu}" if isinstance(on_gpu, str) else on_gpu.describe()
        lines.append(f"cuda:{current}: {text}")
    return "\n".join([*lines, "other devices: torch operators"])


@cache
def _cpu_kernels() -> CpuKernels | str:
    """Return the compiled kernels, or why there are none, which is logged once."""
    try:
        return CpuKernels()
    except OSError as error:
        if LIBRARY_VARIABLE in os.environ or library_path().exists():
            missing = f"the compiled kernels do not load here: {error}"
        else:
            missing = (
                "this installation has no compiled kernels; install a C++ compiler, then, in the checkout: "
                "pip install --force-reinstall --no-deps packages/ddp-quant-hooks"
            )
    return _logged("the CPU", missing)


@cache
def _cuda_kernels(index: int) -> CudaKernels | str:
    """Return a GPU's kernels, or what is missing, which is logged once."""
    if torch.version.cuda is None:
        return "this build of torch is not for CUDA"
    device = torch.device("cuda", index)
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.core") is None:
        missing = "cuda-core is not installed"
    else:
        try:
            return CudaKernels(device)
        except Exception as error:  # noqa: BLE001 - torch's operators work in any case
            missing = f"cuda-core does not work here: {error}"
    extra = "cuda12" if str(torch.version.cuda).startswith("12.") else "cuda"
    missing += (
        f"; in the checkout, pip install 'packages/ddp-quant-hooks[{extra}]' has what this torch (CUDA "
        f"{torch.version.cuda}) needs"
    )
    return _logged(device, missing)


def _logged(device: torch.device | str, missing: str) -> str:
    """Return what is missing for fast kernels, and say it in the log."""
    _log.warning("gradients on %s are quantized by torch's operators, which is slow: %s", device, missing)
    return missing
