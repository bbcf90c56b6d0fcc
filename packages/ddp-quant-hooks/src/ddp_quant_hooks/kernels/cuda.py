"""The kernels for CUDA tensors: compiled at first use, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias, TypeVar

import torch

from ddp_quant_hooks import affine
from ddp_quant_hooks.affine import AffineLayout
from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.kernels.backends import Outgoing
from ddp_quant_hooks.kernels.gpu_programs import (
    GpuProgram,
    affine_pieces,
    affine_program,
    block_program,
    channels_are_short,
    compile_program,
)
from ddp_quant_hooks.wire_format import Layout

__all__ = ["CudaKernels"]

_T = TypeVar("_T")

_ALIGNMENT = 16

# The parameter of a launch: ``Work`` of csrc/block_kernels.cu or csrc/affine_kernels.cu, all 64-bit words.
_MOST_WORDS = 4096 // 8
"""The most words of a parameter, on every architecture."""
_SHARD_WORDS = 5
_Row: TypeAlias = tuple[int, int, int, int, int]
"""``Shard`` in csrc/block_kernels.cu: values, tensor, message, residual, new_residual."""
_AFFINE_WORDS = 5
"""The words before the messages: values, channel, tensor, message, extremes."""
_MOST_THREAD_BLOCKS = 2**31 - 1

_Parameters = ctypes.c_char_p * 1
"""A pointer to each parameter of a kernel. It keeps alive what it points to."""


class CudaKernels:
    """The kernels on one GPU.

    A launch does not block, and can be captured in a CUDA graph once the same kernel has run.

    Args:
        device: The GPU.

    Raises:
        ImportError: ``cuda-core`` is not installed, or finds no ``cuda-bindings``.
        Exception: NVRTC is missing or does not know this GPU, or the driver cannot load what it compiles:
            cuda-core's errors.
    """

    def __init__(self, device: torch.device) -> None:
        # Optional dependencies, needed only with a GPU.
        from cuda.bindings import driver, nvrtc  # noqa: PLC0415

        self._driver = driver
        self._device = device
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        """The architecture that kernels are compiled for."""
        self.compiler = "NVRTC {}.{}".format(*nvrtc.nvrtcVersion()[1:])
        """The compiler."""
        self._kernels: dict[GpuProgram, tuple[Any, Any]] = {}
        self._ready = threading.local()
        with torch.cuda.device(device):  # find out now whether all of it works
            self._kernel(block_program("encode", Layout("int8", 128), dtype=torch.float32))

    # ---- blocks ----

    def encode(self, shards: Sequence[tuple[torch.Tensor, Outgoing]], layout: Layout) -> None:
        """Write the messages of shards of values; see :func:`ddp_quant_hooks.kernels.encode_shards`."""
        rows = [(values.numel(), values.data_ptr(), *out.addresses()) for values, out in shards]
        kept = next((dtype for _, out in shards if (dtype := out.residual_dtype) is not None), None)
        self._encode(rows, layout, shards[0][0].dtype, kept)

    def encode_parts(
        self,
        values: torch.Tensor,
        lengths: Sequence[int],
        messages: Sequence[torch.Tensor],
        layout: Layout,
        residual: torch.Tensor | None,
        new_residual: torch.Tensor | None,
    ) -> None:
        """Write the message of each part of the values, without the time to make tensors of the parts."""
        out = Outgoing(messages[0], residual, new_residual)
        dtype = out.residual_dtype
        size, kept_size = values.element_size(), 0 if dtype is None else dtype.itemsize
        tensor, (_, before, after) = values.data_ptr(), out.addresses()
        rows = []
        for length, message in zip(lengths, messages, strict=True):
            if length:
                rows.append((length, tensor, message.data_ptr(), before, after))
            tensor += length * size
            before += length * kept_size if before else 0
            after += length * kept_size if after else 0
        self._encode(rows, layout, values.dtype, dtype)

    def _encode(
        self, rows: Sequence[_Row], layout: Layout, dtype: torch.dtype, residual_dtype: torch.dtype | None
    ) -> None:
        for some in _batches(rows):
            program = block_program(
                "encode",
                layout,
                dtype=dtype,
                residual_dtype=residual_dtype,
                shards=len(some),
                aligned=_rows_aligned(some),
            )
            self._launch_blocks(program, layout, some, [0])  # no messages are averaged

    def reduce(
        self, messages: Sequence[torch.Tensor], layout: Layout, values: int, out: Outgoing, new_layout: Layout
    ) -> None:
        """Write the message of the mean; see :func:`ddp_quant_hooks.kernels.reduce`."""
        ranks = len(messages)
        if _room_for_shards(ranks) == 0:  # some 500 ranks
            torch_ops.reduce(messages, layout, values, out, new_layout)
            return
        row, addresses = (values, 0, *out.addresses()), [message.data_ptr() for message in messages]
        program = block_program(
            "reduce",
            layout,
            new_layout=new_layout,
            residual_dtype=out.residual_dtype,
            ranks=ranks,
            aligned=_rows_aligned([row]) and _are_aligned(addresses),
        )
        self._launch_blocks(program, layout, [row], addresses)

    def decode(self, shards: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], layout: Layout) -> None:
        """Write the means of shards; see :func:`ddp_quant_hooks.kernels.decode_shards`."""
        ranks, dtype = len(shards[0][0]), shards[0][1].dtype
        if _room_for_shards(ranks) == 0:
            torch_ops.decode(shards, layout)
            return
        for some in _batches(shards, ranks):
            rows = [(values.numel(), values.data_ptr(), 0, 0, 0) for _, values in some]
            addresses = [message.data_ptr() for messages, _ in some for message in messages]
            self._decode(rows, addresses, layout, dtype)

    def decode_parts(
        self, messages: Sequence[torch.Tensor], lengths: Sequence[int], layout: Layout, values: torch.Tensor
    ) -> None:
        """Write each part of the values from its message, without making tensors of the parts."""
        tensor, size, shards = values.data_ptr(), values.element_size(), []
        for length, message in zip(lengths, messages, strict=True):
            if length:
                shards.append(((length, tensor, 0, 0, 0), message.data_ptr()))
            tensor += length * size
        for some in _batches(shards, ranks=1):
            rows, addresses = zip(*some, strict=True)
            self._decode(rows, addresses, layout, values.dtype)

    def _decode(
        self, rows: Sequence[_Row], addresses: Sequence[int], layout: Layout, dtype: torch.dtype
    ) -> None:
        aligned, ranks = _rows_aligned(rows) and _are_aligned(addresses), len(addresses) // len(rows)
        program = block_program("decode", layout, dtype=dtype, shards=len(rows), ranks=ranks, aligned=aligned)
        self._launch_blocks(program, layout, rows, addresses)

    def _launch_blocks(
        self, program: GpuProgram, layout: Layout, rows: Sequence[_Row], addresses: Sequence[int]
    ) -> None:
        most, *_ = max(rows)
        work = [*chain.from_iterable(rows), *addresses]
        self._launch(program, work, -(-layout.blocks(most) // program.blocks_at_a_time), len(rows))

    # ---- PyTorch's 8-bit numbers ----

    def affine_encode(self, values: torch.Tensor, message: torch.Tensor, channel: int) -> None:
        """Write the message of ``values``; see :func:`ddp_quant_hooks.affine.encode`."""
        length, tensor, address = values.numel(), values.data_ptr(), message.data_ptr()
        pieces, aligned = affine_pieces(length, channel), _channels_aligned(channel, [tensor, address])
        if channels_are_short(channel):
            program = affine_program("encode_short_channels", values.dtype, aligned=aligned)
            self._launch(program, [length, channel, tensor, address, 0, 0], pieces)
            return
        channels = -(-length // channel)
        extremes = torch.zeros(2 * channels, dtype=torch.int32, device=values.device)
        work = [length, channel, tensor, address, extremes.data_ptr(), 0]
        for name in ("find_extremes_of_long_channels", "encode_long_channels"):
            self._launch(affine_program(name, values.dtype, aligned=aligned), work, pieces)

    def affine_decode(self, messages: Sequence[torch.Tensor], channel: int, values: torch.Tensor) -> None:
        """Write the mean; see :func:`ddp_quant_hooks.affine.decode_mean`."""
        length, ranks = values.numel(), len(messages)
        if _AFFINE_WORDS + ranks > _MOST_WORDS:
            affine.decode_mean(messages, AffineLayout(length, channel, torch.float32), values)
            return
        tensor, addresses = values.data_ptr(), [message.data_ptr() for message in messages]
        aligned = _channels_aligned(channel, [tensor, *addresses])
        program = affine_program("decode", values.dtype, aligned=aligned, ranks=ranks)
        work = [length, channel, tensor, 0, 0, *addresses]
        self._launch(program, work, affine_pieces(length, channel))

    # ---- launching ----

    def _launch(self, program: GpuProgram, work: list[int], width: int, height: int = 1) -> None:
        """Launch ``width`` x ``height`` thread blocks."""
        if width > _MOST_THREAD_BLOCKS:
            raise ValueError(f"a GPU launches at most {_MOST_THREAD_BLOCKS} thread blocks, not {width}")
        self._start(program, struct.pack(f"{len(work)}Q", *work), width, height)

    def _start(self, program: GpuProgram, work: bytes, width: int, height: int) -> None:
        """Put a launch on torch's current stream."""
        index = self._device.index
        if torch.cuda.current_device() != index:
            with torch.cuda.device(index):
                self._start(program, work, width, height)
            return
        stream = torch.cuda.current_stream(index).cuda_stream
        _, function = self._kernel(program)
        # cuda.core.launch takes no structures (NVIDIA/cuda-python#2343). The driver keeps a copy of the work.
        parameters = _Parameters(work)
        (code,) = self._driver.cuLaunchKernel(
            function, width, height, 1, program.threads, 1, 1, 0, stream, ctypes.addressof(parameters), 0
        )
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{program.call} did not start on {self._device}: {code.name}")

    def _kernel(self, program: GpuProgram) -> tuple[Any, Any]:
        """Return the loaded kernel of a program, and the driver's handle. The device must be current."""
        if not hasattr(self._ready, "device"):
            from cuda.core import Device  # noqa: PLC0415 - as above

            # A thread that has made no runtime call yet has no context for the driver's.
            self._ready.device = Device(self._device.index)
            self._ready.device.set_current()
        found = self._kernels.get(program)
        if found is None:
            from cuda.core import ObjectCode  # noqa: PLC0415 - as above

            code = compile_program(program, self.architecture)
            kernel = ObjectCode.from_cubin(code).get_kernel("kernel")
            found = self._kernels[program] = kernel, self._driver.CUfunction(int(kernel.handle))
        return found


def _room_for_shards(ranks: int) -> int:
    """Return how many shards fit into one launch, with ``ranks`` messages each."""
    return _MOST_WORDS // (_SHARD_WORDS + ranks)


def _batches(shards: Sequence[_T], ranks: int = 1) -> list[Sequence[_T]]:
    """Cut shards into groups for one launch each."""
    size = _room_for_shards(ranks)
    if len(shards) <= size:
        return [shards]
    return [shards[first : first + size] for first in range(0, len(shards), size)]


def _channels_aligned(channel: int, pointers: list[int]) -> bool:
    """Return whether threads may read and write four values at a time, wherever a channel starts."""
    return channel % 4 == 0 and _are_aligned(pointers)


def _rows_aligned(rows: Sequence[_Row]) -> bool:
    lowest = 0
    for _, tensor, message, residual, new_residual in rows:
        lowest |= tensor | message | residual | new_residual
    return lowest % _ALIGNMENT == 0


def _are_aligned(pointers: Sequence[int]) -> bool:
    """Return whether all are multiples of 16: no lower bit is set."""
    return functools.reduce(operator.or_, pointers) % _ALIGNMENT == 0
