"""The GPU kernels as text for NVRTC, and compiled: no GPU is needed for any of this.

Each program has one kernel, for one dtype, format, block size and number of messages whose mean it computes.
A state needs few of them, whatever the lengths of its buckets are: these, and the number of shards, are known
only when a kernel runs. Compiled code is kept on disk, for all processes of a user.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ddp_quant_hooks.kernels.call import Shard
from ddp_quant_hooks.kernels.layout import Layout
from ddp_quant_hooks.kernels.low_rank import ROWS_OF_SUM, SUMS_OF_ROW, FactorCall
from ddp_quant_hooks.kernels.owned_files import make_own_folder, refuse_foreign_file

_log = logging.getLogger(__name__)

CACHE_VARIABLE = "DDP_QUANT_HOOKS_CACHE"
"""The environment variable that names another folder for compiled kernels."""

_SOURCES = Path(__file__).parents[1] / "csrc"
_NUMBERS = {"int8": "Int8", "int4": "Int4", "fp16": "Fp16", "int1": "Int1"}
_VALUES = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}

# As in csrc/block_kernels.cu and csrc/affine_kernels.cu; every program asserts that both agree.
THREADS = 128
"""The number of threads in a thread block."""
_WARP = 32
MOST_WORDS = 4096 // 8
"""The most words of a kernel's parameter, on every architecture."""
_AFFINE_PIECE = 1 << 13
_LONG_BLOCK = 512
FACTORS_AT_A_TIME = 8
"""How many columns of a factor a thread multiplies with."""
MOST_RANK = 64
"""Factors of a higher rank are left to torch's operators."""


class AffineWork(NamedTuple):
    """The beginning of ``Work`` in csrc/affine_kernels.cu, before the messages; addresses: 0 if unused."""

    values: int
    channel: int
    tensor: int
    message: int = 0
    extremes: int = 0


@dataclass(frozen=True)
class GpuProgram:
    """One kernel, as C++ text.

    Attributes:
        file: The kernel's file in ``csrc``.
        call: The kernel with its template's arguments.
        work: The type of its only parameter.
        words: The size of that, in 64-bit words.
        blocks_at_a_time: Blocks, or channels' pieces, that a thread block works on.
        checks: What must be true for the numbers here to be the kernel's, in C++.
        at_least: Thread blocks that a multiprocessor must have room for; 0: the compiler decides.
    """

    file: str
    call: str
    work: str
    words: int
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


def most_shards(ranks: int) -> int:
    """Return how many shards a launch has room for, each with the messages of so many ranks."""
    return MOST_WORDS // (len(Shard._fields) + max(ranks, 1))


@functools.cache  # called at every launch
def block_program(
    layout: Layout,
    new_layout: Layout | None = None,
    *,
    dtype: torch.dtype | None = None,
    aligned: bool = True,
    ranks: int = 0,
    residuals: bool = False,
) -> GpuProgram:
    """Return a kernel of ``csrc/block_kernels.cu``.

    Args:
        layout: Of the messages that are averaged, or of those that are written.
        new_layout: Of the messages that are written after averaging; ``None``: ``layout``.
        dtype: Of the values that are encoded or decoded; ``None``: the mean of messages is encoded again.
        aligned: Whether all tensors and messages start at multiples of 16 bytes.
        ranks: How many messages are averaged; 0: values are encoded.
        residuals: Whether what is encoded has any.
    """
    new_layout = new_layout or layout
    numbers, new_numbers = _NUMBERS[layout.format], _NUMBERS[new_layout.format]
    block, rotate, unit = layout.block_size, layout.rotate, 8 if dtype is None else 16 // dtype.itemsize
    parts = 1 if dtype is None else most_shards(ranks)
    arguments: list[Any]
    if dtype is None:
        name = "reduce"
        arguments = [residuals, numbers, new_numbers, block, aligned, rotate, new_layout.rotate]
    elif ranks:
        name, arguments = "decode", [_VALUES[dtype], numbers, block, aligned, rotate, parts]
    else:
        name, arguments = "encode", [_VALUES[dtype], residuals, numbers, block, aligned, rotate, parts]
    call = _call(name, *arguments, *([ranks] if ranks else []))
    work = f"Work<{parts}, {max(ranks, 1)}>"
    words = parts * (len(Shard._fields) + max(ranks, 1))
    teams = THREADS // min(_WARP, block // 2 // unit)  # a lane has at least one unit of each half
    checks = [
        f"kThreads == {THREADS}",
        f"{_call('Block', numbers, block, unit, aligned)}::kTeams == {teams}",
        f"sizeof(Shard) == {8 * len(Shard._fields)}",
        f"sizeof({work}) == {8 * words}",
    ]
    # Without this bound the compiler gives some of these kernels too few registers, so that they spill.
    rotates_long_blocks = name == "decode" and rotate and block >= _LONG_BLOCK
    at_least = 4 if residuals or rotates_long_blocks else 0
    return GpuProgram("block_kernels.cu", call, work, words, teams, " && ".join(checks), at_least)


def _call(template: str, *arguments: object) -> str:
    """Return a template with its arguments, in C++."""
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in arguments]
    return f"{template}<{', '.join(texts)}>"


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
    call = _call(kernel, _VALUES[dtype], aligned, *([ranks] if kernel == "decode" else []))
    work = f"Work<{ranks}>"
    words = len(AffineWork._fields) + ranks
    size = f"sizeof({work}) == {8 * words}"
    checks = " && ".join([f"kThreads == {THREADS}", f"kPiece == {_AFFINE_PIECE}", size])
    return GpuProgram("affine_kernels.cu", call, work, words, 1, checks)


@functools.cache
def low_rank_program(kernel: str, dtype: torch.dtype | None = None) -> GpuProgram:
    """Return a kernel of ``csrc/low_rank_kernels.cu``.

    Args:
        kernel: Its name there.
        dtype: Of the gradient; ``None``: it works on factors alone.
    """
    words = 12  # the sizes, the addresses of tensors, and that of scratch memory
    constants = {
        "kThreads": THREADS,
        "kSums": SUMS_OF_ROW,
        "kRowsOfSum": ROWS_OF_SUM,
        "kFactors": FACTORS_AT_A_TIME,
        "kMostRank": MOST_RANK,
        "sizeof(Work)": 8 * words,
    }
    checks = " && ".join(f"{name} == {value}" for name, value in constants.items())
    call = kernel if dtype is None else _call(kernel, _VALUES[dtype])
    return GpuProgram("low_rank_kernels.cu", call, "Work", words, 1, checks)


def low_rank_launches(call: FactorCall) -> tuple[int, list[tuple[GpuProgram, int, int]]]:
    """Return the bytes of scratch memory for a call, and its launches: programs, widths and heights."""
    dtype, values = call.matrix.values.dtype, call.rows * call.columns
    groups = -(-call.rank // FACTORS_AT_A_TIME)  # how often threads go through the matrix
    if call.kernel == "multiply":
        width = -(-call.rows // (THREADS // SUMS_OF_ROW)) * groups
        return 0, [(low_rank_program("multiply", dtype), width, 1)]
    if call.kernel == "multiply_transposed":
        blocks, sums = -(-call.rows // ROWS_OF_SUM), call.rank * call.columns
        of_blocks = low_rank_program("multiply_block", dtype), -(-call.columns // THREADS) * groups, blocks
        return 4 * blocks * sums, [of_blocks, (low_rank_program("add_blocks"), -(-sums // THREADS), 1)]
    if call.kernel == "restore":
        return 0, [(low_rank_program("restore", dtype), -(-values // THREADS), 1)]
    doubles = call.rows * (1 + call.rank) if call.kernel == "find_basis" else call.columns
    return 8 * doubles, [(low_rank_program(call.kernel), 1, 1)]


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


def compile_program(program: GpuProgram, architecture: str, *, logs: Any = None) -> bytes:
    """Return a program as machine code: from the disk if it is there, else compiled, and kept there.

    Args:
        program: What to compile.
        architecture: Such as ``"sm_90"``.
        logs: Gets the compiler's report, registers and spills among it; a text stream.

    Raises:
        ImportError: ``cuda-core`` is not installed.
        Exception: NVRTC is not there, or does not know the architecture: cuda-core's errors.
    """
    # Optional dependencies, needed only to compile.
    from cuda.bindings import nvrtc  # noqa: PLC0415
    from cuda.core import Program, ProgramOptions  # noqa: PLC0415

    options: dict[str, Any] = {
        "name": program.call,
        "arch": architecture,
        "std": "c++17",
        # One rounding per operator, as everywhere.
        "fma": False,
        "ftz": False,
        "prec_div": True,
        "ptxas_options": "-v",
    }
    made_of = repr((program.text, options, nvrtc.nvrtcVersion()))
    folder = cache_folder()
    file = None if folder is None else folder / f"{hashlib.sha256(made_of.encode()).hexdigest()}.cubin"
    kept = None if file is None else _read(file)
    if kept is not None:
        return kept
    code = bytes(Program(program.text, "c++", ProgramOptions(**options)).compile("cubin", logs=logs).code)
    if file is not None:
        _write(file, code)
    return code


# ---- compiled code on disk: a digest of it, then the code ----

_DIGEST_BYTES = hashlib.sha256().digest_size


def _read(file: Path) -> bytes | None:
    """Return the code in a file, if it is there, whole, and of this user alone."""
    try:
        refuse_foreign_file(file)
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("a compiled kernel on disk is not used: %s", error)
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _log.warning("a compiled kernel is damaged on disk: compiling it again")
    return None


def _write(file: Path, code: bytes) -> None:
    """Keep code in a file, for this user alone; other processes see all of it or nothing."""
    try:
        make_own_folder(file.parent)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:  # nothing is left if writing fails
            part = Path(folder) / file.name
            part.touch(mode=0o600)
            part.write_bytes(hashlib.sha256(code).digest() + code)
            part.replace(file)
    except OSError as error:
        _log.warning("a compiled kernel is not kept on disk: %s", error)
