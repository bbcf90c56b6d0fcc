"""The kernels for CUDA tensors: compiled at first use, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

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

_MOST_BYTES = 4096
"""Of what one launch is given, on every architecture."""
_MOST_THREAD_BLOCKS = 2**31 - 1


class _Shard(ctypes.Structure):
    """As ``Shard`` in csrc/block_kernels.cu."""

    _fields_ = (
        ("values", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("new_residual", ctypes.c_void_p),
    )


@functools.cache
def _block_work(shards: int, messages: int) -> type[ctypes.Structure]:
    """Return ``Work`` of csrc/block_kernels.cu."""
    fields = (("shards", _Shard * shards), ("messages", ctypes.c_void_p * messages))
    return type("Work", (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def _affine_work(messages: int) -> type[ctypes.Structure]:
    """Return ``Work`` of csrc/affine_kernels.cu."""
    fields = (
        ("values", ctypes.c_int64),
        ("channel", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("message", ctypes.c_void_p),
        ("extremes", ctypes.c_void_p),
        ("messages", ctypes.c_void_p * messages),
    )
    return type("Work", (ctypes.Structure,), {"_fields_": fields})


class CudaKernels:
    """The kernels on one GPU.

    A launch waits for nothing, and can be captured in a CUDA graph once the same kernel has run.

    Args:
        device: The GPU.

    Raises:
        ImportError: ``cuda-core`` is not installed, or finds no ``cuda-bindings``.
        Exception: NVRTC is missing or does not know this GPU, or the driver cannot load what it compiles:
            cuda-core's errors.
    """

    def __init__(self, device: torch.device) -> None:
        # Optional: only who has a GPU needs them.
        from cuda.bindings import driver, nvrtc  # noqa: PLC0415

        self._driver = driver
        self._device = device
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        """What is compiled for."""
        self.compiler = "NVRTC {}.{}".format(*nvrtc.nvrtcVersion()[1:])
        """What compiles."""
        self._kernels: dict[GpuProgram, tuple[Any, Any]] = {}
        self._ready = threading.local()
        with torch.cuda.device(device):  # find out now whether all of it works
            self._kernel(block_program("encode", Layout("int8", 128), dtype=torch.float32))

    # ---- blocks ----

    def encode(self, shards: Sequence[tuple[torch.Tensor, Outgoing]], layout: Layout) -> None:
        """Write the messages of shards of values; see :func:`ddp_quant_hooks.kernels.encode_shards`."""
        for some in _batches(shards):
            work = _block_work(len(some), 1)()
            for place, (values, out) in zip(work.shards, some, strict=True):
                place.values, place.tensor = values.numel(), values.data_ptr()
                place.message, place.residual, place.new_residual = out.addresses()
            (values, out), aligned = some[0], _all_aligned(work)
            program = block_program(
                "encode",
                layout,
                dtype=values.dtype,
                residual_dtype=out.residual_dtype,
                shards=len(some),
                aligned=aligned,
            )
            self._launch_blocks(program, layout, work)

    def reduce(
        self, messages: Sequence[torch.Tensor], layout: Layout, values: int, out: Outgoing, new_layout: Layout
    ) -> None:
        """Write the message of the mean; see :func:`ddp_quant_hooks.kernels.reduce`."""
        if _room_for_shards(len(messages)) == 0:  # some 500 ranks
            torch_ops.reduce(messages, layout, values, out, new_layout)
            return
        work = _block_work(1, len(messages))()
        (place,) = work.shards
        place.values = values
        place.message, place.residual, place.new_residual = out.addresses()
        work.messages[:] = [message.data_ptr() for message in messages]
        ranks, aligned = len(messages), _all_aligned(work)
        program = block_program(
            "reduce",
            layout,
            new_layout=new_layout,
            residual_dtype=out.residual_dtype,
            ranks=ranks,
            aligned=aligned,
        )
        self._launch_blocks(program, layout, work)

    def decode(self, shards: Sequence[tuple[Sequence[torch.Tensor], torch.Tensor]], layout: Layout) -> None:
        """Write the means of shards; see :func:`ddp_quant_hooks.kernels.decode_shards`."""
        ranks = len(shards[0][0])
        if _room_for_shards(ranks) == 0:
            torch_ops.decode(shards, layout)
            return
        for some in _batches(shards, ranks):
            work = _block_work(len(some), len(some) * ranks)()
            for place, (_, values) in zip(work.shards, some, strict=True):
                place.values, place.tensor = values.numel(), values.data_ptr()
            work.messages[:] = [message.data_ptr() for messages, _ in some for message in messages]
            dtype, count, aligned = some[0][1].dtype, len(some), _all_aligned(work)
            program = block_program("decode", layout, dtype=dtype, shards=count, ranks=ranks, aligned=aligned)
            self._launch_blocks(program, layout, work)

    def _launch_blocks(self, program: GpuProgram, layout: Layout, work: Any) -> None:
        most = max(layout.blocks(shard.values) for shard in work.shards)
        self._launch(program, work, -(-most // program.blocks_at_a_time), len(work.shards))

    # ---- PyTorch's 8-bit numbers ----

    def affine_encode(self, values: torch.Tensor, message: torch.Tensor, channel: int) -> None:
        """Write the message of ``values``; see :func:`ddp_quant_hooks.affine.encode`."""
        work = _affine_work(1)(values=values.numel(), channel=channel)
        work.tensor, work.message = values.data_ptr(), message.data_ptr()
        pieces, aligned = affine_pieces(values.numel(), channel), _channels_aligned(work)
        if channels_are_short(channel):
            program = affine_program("encode_short_channels", values.dtype, aligned=aligned)
            self._launch(program, work, pieces)
            return
        channels = -(-values.numel() // channel)
        extremes = torch.zeros(2 * channels, dtype=torch.int32, device=values.device)
        work.extremes = extremes.data_ptr()
        for name in ("find_extremes_of_long_channels", "encode_long_channels"):
            self._launch(affine_program(name, values.dtype, aligned=aligned), work, pieces)

    def affine_decode(self, messages: Sequence[torch.Tensor], channel: int, values: torch.Tensor) -> None:
        """Write the mean; see :func:`ddp_quant_hooks.affine.decode_mean`."""
        kind = _affine_work(len(messages))
        if ctypes.sizeof(kind) > _MOST_BYTES:
            affine.decode_mean(messages, AffineLayout(values.numel(), channel, torch.float32), values)
            return
        work = kind(values=values.numel(), channel=channel)
        work.tensor = values.data_ptr()
        work.messages[:] = [message.data_ptr() for message in messages]
        aligned = _channels_aligned(work)
        program = affine_program("decode", values.dtype, aligned=aligned, ranks=len(messages))
        self._launch(program, work, affine_pieces(values.numel(), channel))

    # ---- launching ----

    def _launch(self, program: GpuProgram, work: ctypes.Structure, width: int, height: int = 1) -> None:
        """Launch ``width`` x ``height`` thread blocks."""
        if width > _MOST_THREAD_BLOCKS:
            raise ValueError(f"a GPU launches at most {_MOST_THREAD_BLOCKS} thread blocks, not {width}")
        self._start(program, work, width, height)

    def _start(self, program: GpuProgram, work: ctypes.Structure, width: int, height: int) -> None:
        """Put a launch on torch's current stream."""
        with torch.cuda.device(self._device):
            _, function = self._kernel(program)
            stream = torch.cuda.current_stream(self._device).cuda_stream
            # cuda.core.launch takes no structures (NVIDIA/cuda-python#2343).
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(work))
            (code,) = self._driver.cuLaunchKernel(
                function, width, height, 1, program.threads, 1, 1, 0, stream, ctypes.addressof(parameters), 0
            )
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{program.call} did not start on {self._device}: {code.name}")

    def _kernel(self, program: GpuProgram) -> tuple[Any, Any]:
        """Return the loaded kernel of a program, and as the driver knows it. The device must be current."""
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
    """Return how many shards fit into one launch, with as many messages each."""
    return _MOST_BYTES // (ctypes.sizeof(_Shard) + ranks * ctypes.sizeof(ctypes.c_void_p))


def _batches(shards: Sequence[_T], ranks: int = 1) -> list[Sequence[_T]]:
    """Cut shards into groups for one launch each."""
    size = _room_for_shards(ranks)
    return [shards[first : first + size] for first in range(0, len(shards), size)]


def _all_aligned(work: Any) -> bool:
    """Tell whether everything that a launch works on starts at multiples of 16 bytes."""
    pointers = [getattr(shard, name) for shard in work.shards for name, _ in _Shard._fields_[1:]]
    return _are_aligned([*pointers, *work.messages])


def _channels_aligned(work: Any) -> bool:
    """Tell whether threads may read and write four values at a time, wherever a channel starts."""
    return work.channel % 4 == 0 and _are_aligned([work.tensor, work.message, *work.messages])


def _are_aligned(pointers: list[int | None]) -> bool:
    return all((pointer or 0) % _ALIGNMENT == 0 for pointer in pointers)
