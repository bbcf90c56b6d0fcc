"""The kernels for CUDA tensors: compiled at first use, launched on torch's current stream."""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ddp_quant_hooks.kernels import torch_ops
from ddp_quant_hooks.kernels.affine import AffineLayout
from ddp_quant_hooks.kernels.call import VALUE_DTYPES, KernelCall
from ddp_quant_hooks.kernels.layout import ALIGNMENT, Layout
from ddp_quant_hooks.kernels.low_rank import FactorCall
from ddp_quant_hooks.kernels.programs import (
    MOST_RANK,
    MOST_WORDS,
    THREADS,
    AffineWork,
    GpuProgram,
    affine_pieces,
    affine_program,
    block_program,
    channels_are_short,
    compile_program,
    low_rank_launches,
    most_shards,
)

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
            self._kernel(block_program(Layout("int8", 128), dtype=torch.float32))

    def describe(self) -> str:
        """Say what computes."""
        return f"CUDA kernels for {self.architecture}, compiled by {self.compiler}"

    # ---- blocks ----

    def run(self, call: KernelCall) -> None:
        """Do a call, in one launch if all fits; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
        at_a_time = most_shards(call.ranks)
        if at_a_time == 0:  # some 500 ranks
            torch_ops.run(call)
            return
        filled = [(index, shard) for index, shard in enumerate(call.shards()) if shard.values]
        for first in range(0, len(filled), at_a_time):
            work, pointers, most = list[int](), list[int](), 0
            for index, shard in filled[first : first + at_a_time]:
                messages = [message.data_ptr() for message in call.incoming[index]] if call.incoming else [0]
                work += [*shard, *messages]
                pointers += [*shard[1:], *messages]
                most = max(most, shard.values)
            program = block_program(
                call.layout,
                call.new_layout,
                dtype=None if call.values is None else call.values.dtype,
                residuals=call.residual is not None or call.new_residual is not None,
                ranks=call.ranks,
                aligned=_are_aligned(pointers),
            )
            width = -(-call.layout.blocks(most) // program.blocks_at_a_time)
            self._launch(program, work, width, min(at_a_time, len(filled) - first))

    # ---- PyTorch's 8-bit numbers ----

    def affine_encode(self, values: torch.Tensor, message: torch.Tensor, layout: AffineLayout) -> None:
        """Write the message; see :func:`ddp_quant_hooks.kernels.affine_encode`."""
        if values.dtype not in VALUE_DTYPES:
            torch_ops.affine_encode(values, message, layout)
            return
        work = AffineWork(layout.values, layout.channel, values.data_ptr(), message=message.data_ptr())
        # Threads may read and write four values at a time, wherever a channel starts.
        aligned = work.channel % 4 == 0 and _are_aligned([work.tensor, work.message])
        pieces = affine_pieces(layout.values, layout.channel)
        if channels_are_short(layout.channel):
            program = affine_program("encode_short_channels", values.dtype, aligned=aligned)
            self._launch(program, [*work, 0], pieces)  # no messages are averaged
            return
        extremes = torch.zeros(2 * layout.channels, dtype=torch.int32, device=values.device)
        work = work._replace(extremes=extremes.data_ptr())
        for name in ("find_extremes_of_long_channels", "encode_long_channels"):
            self._launch(affine_program(name, values.dtype, aligned=aligned), [*work, 0], pieces)

    def affine_decode(
        self, messages: Sequence[torch.Tensor], layout: AffineLayout, values: torch.Tensor
    ) -> None:
        """Write the mean; see :func:`ddp_quant_hooks.kernels.affine_decode`."""
        ranks = len(messages)
        work = AffineWork(layout.values, layout.channel, values.data_ptr())
        if values.dtype not in VALUE_DTYPES or len(work) + ranks > MOST_WORDS:
            torch_ops.affine_decode(messages, layout, values)
            return
        addresses = [message.data_ptr() for message in messages]
        aligned = work.channel % 4 == 0 and _are_aligned([work.tensor, *addresses])
        program = affine_program("decode", values.dtype, aligned=aligned, ranks=ranks)
        self._launch(program, [*work, *addresses], affine_pieces(layout.values, layout.channel))

    # ---- matrices and their factors ----

    def run_on_factors(self, calls: Sequence[FactorCall]) -> None:
        """Do calls; see :class:`ddp_quant_hooks.kernels.dispatch.Backend`."""
        for call in calls:
            if call.rank > MOST_RANK and call.kernel in {"find_basis", "follow"}:
                torch_ops.run_on_factors([call])
            else:
                self._run_on_factors(call)

    def _run_on_factors(self, call: FactorCall) -> None:
        scratch_bytes, launches = low_rank_launches(call)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=call.device)
        for program, width, height in launches:
            self._launch(program, [*call.words(), scratch.data_ptr()], width, height)

    # ---- launching ----

    def _launch(self, program: GpuProgram, work: list[int], width: int, height: int = 1) -> None:
        """Launch ``width`` x ``height`` thread blocks.

        Args:
            program: What to run.
            work: The beginning of its parameter, ``Work`` of csrc/block_kernels.cu or csrc/affine_kernels.cu,
                in 64-bit words.
            width: Of the grid.
            height: Likewise.
        """
        if width > _MOST_THREAD_BLOCKS:
            raise ValueError(f"a GPU launches at most {_MOST_THREAD_BLOCKS} thread blocks, not {width}")
        missing = program.words - len(work)  # of shards that this launch does not have
        self._start(program, struct.pack(f"{len(work)}Q{8 * missing}x", *work), width, height)

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
            function, width, height, 1, THREADS, 1, 1, 0, stream, ctypes.addressof(parameters), 0
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


def _are_aligned(pointers: Sequence[int]) -> bool:
    """Return whether all are multiples of 16: no lower bit is set."""
    return functools.reduce(operator.or_, pointers) % ALIGNMENT == 0
