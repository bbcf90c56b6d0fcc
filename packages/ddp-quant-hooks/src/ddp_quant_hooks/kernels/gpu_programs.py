"""The GPU kernels as text for NVRTC, and compiled: no GPU is needed for any of this.

Each program has one kernel, for one dtype, format, block size and number of messages. Compiled code is kept
on disk, for all processes of a user.
"""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_quant_hooks.wire_format import Layout

__all__ = [
    "CACHE_VARIABLE",
    "GpuProgram",
    "affine_pieces",
    "affine_program",
    "block_program",
    "cache_folder",
    "channels_are_short",
    "compile_program",
    "lanes_of_team",
]

CACHE_VARIABLE = "DDP_QUANT_HOOKS_CACHE"
"""The environment variable that names another folder for compiled kernels."""

_SOURCES = Path(__file__).parents[1] / "csrc"
_NUMBERS = {"int8": "Int8", "int4": "Int4", "bf16": "Halves<BFloat16>", "fp16": "Halves<Float16>"}
_VALUES = {
    torch.float32: "Stored32",
    torch.bfloat16: "Stored16<BFloat16>",
    torch.float16: "Stored16<Float16>",
}

_CPP = {True: "true", False: "false"}

# As kThreads and kMostValues in csrc/block_kernels.cu; every program asserts that both agree.
_BLOCK_THREADS = 128
_WARP = 32
_MOST_VALUES = 32
_AFFINE_THREADS = 128
_AFFINE_PIECE = 1 << 13


@dataclass(frozen=True)
class GpuProgram:
    """One kernel, as C++ text.

    Attributes:
        file: The kernel's file in ``csrc``.
        call: The kernel with its template's arguments.
        work: The type of its only parameter.
        threads: The number of threads in a thread block.
        blocks_at_a_time: Blocks, or channels' pieces, that a thread block works on.
        checks: What must be true for the numbers here to be the kernel's, in C++.
        at_least: Thread blocks that a multiprocessor must have room for; 0: the compiler decides.
    """

    file: str
    call: str
    work: str
    threads: int
    blocks_at_a_time: int
    checks: str
    at_least: int = 0

    def entry(self, name: str = "kernel") -> str:
        """Return the kernel's definition under a name, to append to its file's text."""
        declaration = f"void {name}(const __grid_constant__ {self.work} work)"
        bounds = f"kThreads, {self.at_least}" if self.at_least else "kThreads"
        return (
            f"namespace {Path(self.file).stem} {{\n"
            f"static_assert({self.checks});\n"
            f'extern "C" __global__ __launch_bounds__({bounds}) {declaration} {{ {self.call}(work); }}\n'
            "}\n"
        )

    @property
    def text(self) -> str:
        """The whole program, which includes nothing."""
        return source(self.file) + self.entry()


@functools.cache
def source(file: str) -> str:
    """Return a file of ``csrc`` with our own includes expanded where they first occur."""
    seen: set[str] = set()

    def include(match: re.Match[str]) -> str:
        name = match.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return expand(name)

    def expand(name: str) -> str:
        return re.sub(r'^#include "(.+)"\n', include, (_SOURCES / name).read_text(), flags=re.MULTILINE)

    return "#define FOUR_AT_A_TIME\n" + expand(file)


@functools.cache  # called at every launch
def block_program(
    kernel: str,
    layout: Layout,
    *,
    dtype: torch.dtype | None = None,
    new_layout: Layout | None = None,
    aligned: bool = True,
    shards: int = 1,
    ranks: int = 1,
    residual_dtype: torch.dtype | None = None,
) -> GpuProgram:
    """Return a kernel of ``csrc/block_kernels.cu``.

    Args:
        kernel: ``"encode"``, ``"reduce"`` or ``"decode"``.
        layout: Of the messages.
        dtype: Of the values that are encoded or decoded.
        new_layout: Of the message that ``reduce`` writes.
        aligned: Whether all tensors and messages start at multiples of 16 bytes.
        shards: The number of shards.
        ranks: How many messages are averaged.
        residual_dtype: Of the residuals of ``encode`` and ``reduce``; ``None``: there are none.
    """
    numbers, block, whole = _NUMBERS[layout.format], layout.block_size, _CPP[aligned]
    if kernel == "reduce":
        assert new_layout is not None
        unit = 8
        kept, new_numbers = _stored_residuals(residual_dtype), _NUMBERS[new_layout.format]
        rotations = f"{_CPP[layout.rotate]}, {_CPP[new_layout.rotate]}"
        arguments = f"{kept}, {numbers}, {new_numbers}, {block}, {whole}, {rotations}, {ranks}"
        work = f"Work<1, {ranks}>"
    else:
        assert dtype is not None
        unit = 16 // dtype.itemsize
        kept = f"{_stored_residuals(residual_dtype)}, " if kernel == "encode" else ""
        averaged = f", {ranks}" if kernel == "decode" else ""
        rotate = _CPP[layout.rotate]
        arguments = f"{_VALUES[dtype]}, {kept}{numbers}, {block}, {whole}, {rotate}, {shards}{averaged}"
        work = f"Work<{shards}, {shards * ranks if kernel == 'decode' else 1}>"
    teams = _BLOCK_THREADS // lanes_of_team(block, unit)
    checks = f"kThreads == {_BLOCK_THREADS} && Block<{numbers}, {block}, {unit}, {whole}>::kTeams == {teams}"
    # Without this bound the compiler gives some kernels with residuals too few registers, so that they spill.
    at_least = 0 if residual_dtype is None else 4
    call = f"{kernel}<{arguments}>"
    return GpuProgram("block_kernels.cu", call, work, _BLOCK_THREADS, teams, checks, at_least)


def _stored_residuals(dtype: torch.dtype | None) -> str:
    return "NoResiduals" if dtype is None else _VALUES[dtype]


def lanes_of_team(block: int, unit: int) -> int:
    """Return how many lanes share a block, in units of ``unit`` values of each half."""
    units, lanes = block // 2 // unit, 1
    while lanes < units and (lanes < _WARP or block > lanes * _MOST_VALUES):
        lanes *= 2
    return lanes


@functools.cache
def affine_program(kernel: str, dtype: torch.dtype, *, aligned: bool = True, ranks: int = 1) -> GpuProgram:
    """Return a kernel of ``csrc/affine_kernels.cu``.

    Args:
        kernel: Its name there.
        dtype: Of the values.
        aligned: Whether tensors and messages start at multiples of 16 bytes, and channels at multiples of 4
            values.
        ranks: How many messages are averaged.
    """
    arguments = f"{_VALUES[dtype]}, {_CPP[aligned]}" + (f", {ranks}" if kernel == "decode" else "")
    checks = f"kThreads == {_AFFINE_THREADS} && kPiece == {_AFFINE_PIECE}"
    return GpuProgram(
        "affine_kernels.cu", f"{kernel}<{arguments}>", f"Work<{ranks}>", _AFFINE_THREADS, 1, checks
    )


def affine_pieces(values: int, channel: int) -> int:
    """Return how many thread blocks ``values`` values in channels of ``channel`` take."""
    return -(-values // channel) * -(-channel // _AFFINE_PIECE)


def channels_are_short(channel: int) -> bool:
    """Return whether one thread block can process a whole channel."""
    return channel <= _AFFINE_PIECE


def cache_folder() -> Path | None:
    """Return where compiled kernels are kept: :data:`CACHE_VARIABLE`, or the user's cache folder, if any."""
    chosen, root = os.environ.get(CACHE_VARIABLE), os.environ.get("XDG_CACHE_HOME")
    if chosen:
        return Path(chosen)
    try:
        return (Path(root) if root else Path.home() / ".cache") / "ddp-quant-hooks"
    except RuntimeError:  # a user without a home, as in some containers
        return None


def compile_program(
    program: GpuProgram, architecture: str, *, logs: Any = None, use_cache: bool = True
) -> bytes:
    """Return a program as machine code.

    Args:
        program: What to compile.
        architecture: Such as ``"sm_90"``.
        logs: Gets the compiler's report, registers and spills among it; a text stream.
        use_cache: Take it from the disk if it is there, and keep it there.

    Raises:
        ImportError: ``cuda-core`` is not installed.
        Exception: NVRTC is not there, or does not know the architecture: cuda-core's errors.
    """
    # Optional dependencies, needed only to compile.
    from cuda.core import Program, ProgramOptions  # noqa: PLC0415

    from ddp_quant_hooks.kernels.gpu_cache import open_cache  # noqa: PLC0415

    options = ProgramOptions(
        name=program.call,
        arch=architecture,
        std="c++17",
        # One rounding per operator, as everywhere.
        fma=False,
        ftz=False,
        prec_div=True,
        ptxas_options="-v",
    )
    folder = cache_folder() if use_cache else None
    cache = None if folder is None else open_cache(folder)
    return bytes(Program(program.text, "c++", options).compile("cubin", logs=logs, cache=cache).code)
