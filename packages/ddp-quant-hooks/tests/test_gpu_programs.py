"""The GPU kernels as programs: NVRTC compiles all of them, to good code, and once; no GPU is needed."""

import io
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch
from kernel_backends import computed_by

from ddp_quant_hooks import kernels
from ddp_quant_hooks.exchange.planner import shard_lengths
from ddp_quant_hooks.kernels import Layout, torch_ops
from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.kernels.dispatch import backend_for
from ddp_quant_hooks.kernels.programs import affine_program, block_program, compile_program, low_rank_program

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
LAYOUTS = [
    *(Layout(kind, block) for kind, block in (("int8", 128), ("int4", 32), ("fp16", 128), ("int8", 1024))),
    Layout("int1", 256),
    *(Layout(kind, block, rotate=True) for kind, block in (("int8", 128), ("int4", 32), ("int8", 512))),
]


def _every_program():
    """Yield every kernel for every dtype and format, for short and long blocks, and any alignment."""
    for layout in LAYOUTS:
        for dtype in kernels.VALUE_DTYPES:
            yield block_program(layout, dtype=dtype)
            yield block_program(layout, dtype=dtype, ranks=2)
            yield block_program(layout, dtype=dtype, residuals=True, aligned=False)
        for ranks in (2, 8, 100):
            yield block_program(layout, ranks=ranks, residuals=ranks == 2)
        for kind in ("int8", "int4", "fp16"):
            yield block_program(layout, Layout(kind, layout.block_size), ranks=4, aligned=False)
    for dtype, aligned in product(kernels.VALUE_DTYPES, (True, False)):
        for name in ("encode_short_channels", "find_extremes_of_long_channels", "encode_long_channels"):
            yield affine_program(name, dtype, aligned=aligned)
        yield affine_program("decode", dtype, aligned=aligned, ranks=8)
    for name, dtype in product(("multiply", "multiply_block", "restore"), kernels.VALUE_DTYPES):
        yield low_rank_program(name, dtype)
    for name in ("add_blocks", "find_basis", "follow"):
        yield low_rank_program(name)


class _Launches(CudaKernels):
    """Notes which programs are launched, and launches none."""

    def __init__(self):
        self.programs = set()

    def _start(self, program, work, width, height):
        assert len(work) == 8 * program.words
        assert width * height > 0
        self.programs.add(program)


@pytest.mark.parametrize("ranks", [3, 8, 100])
def test_three_programs_average_buckets_of_any_length(ranks):
    """Encode, reduce, decode: shards of any number and length, of which some may be empty, are aligned."""
    gpu, layout = _Launches(), Layout("int8", 128, rotate=True)
    for length in (*range(1, 400, 7), 1023, 4096, 99_999, 1_000_001):
        values, lengths = torch.zeros(length), shard_lengths(length, ranks, 128)
        sizes = [layout.message_bytes(shard) for shard in lengths]
        messages = torch.split(torch.zeros(sum(sizes), dtype=torch.uint8), sizes)
        shard = lengths[-1]
        mean, *others = [torch.zeros(sizes[-1], dtype=torch.uint8) for _ in range(ranks)]
        with computed_by(gpu):
            kernels.encode_shards(values, messages, lengths, layout)
            kernels.reduce([mean, *others], layout, shard, mean, layout)
            kernels.decode_shards([[message] for message in messages], lengths, layout, values)
    assert gpu.programs == {
        block_program(layout, dtype=torch.float32),
        block_program(layout, ranks=ranks),
        block_program(layout, dtype=torch.float32, ranks=1),
    }


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_QUANT_HOOKS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _compiler():
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")


def _known_architectures():
    from cuda.bindings import nvrtc  # noqa: PLC0415 - an extra

    error, architectures = nvrtc.nvrtcGetSupportedArchs()
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    return architectures


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_every_kernel_compiles_and_keeps_everything_in_registers(architecture, some):
    if int(architecture.removeprefix("sm_")) not in _known_architectures():
        pytest.skip(f"the NVRTC in this process, of an older CUDA of torch's, does not know {architecture}")
    programs = [*_every_program()]
    if some:
        programs = random.Random(architecture).sample(programs, 6)

    def report(program):
        logs = io.StringIO()
        code = compile_program(program, architecture, logs=logs)
        return program.call, code[:4], logs.getvalue()

    with ThreadPoolExecutor(2) as pool:
        for call, beginning, text in pool.map(report, programs):
            assert beginning == b"\x7fELF", call
            used = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", text)
            assert sorted(used) == [("0", "spill loads"), ("0", "spill stores"), ("0", "stack frame")], call
            (registers,) = re.findall(r"Used (\d+) registers", text)
            # As many as leave room for 512 threads on a multiprocessor.
            assert int(registers) <= 128, call


@pytest.mark.parametrize(
    ("device", "cuda", "reason", "remedy"),
    [
        (61, "12.8", "cuda-core is not installed", "'packages/ddp-quant-hooks[cuda12]'"),
        (62, "13.0", "cuda-core does not work here", "'packages/ddp-quant-hooks[cuda]'"),
    ],
)
def test_where_gpu_kernels_do_not_work_the_log_says_once_why(
    monkeypatch, caplog, device, cuda, reason, remedy
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if "not installed" in reason:
        monkeypatch.setitem(sys.modules, "cuda", None)
    else:  # there is no GPU of this number
        pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")
    for _ in range(2):
        assert backend_for(torch.device("cuda", device)) is torch_ops
    (message,) = caplog.messages
    assert message.startswith(
        f"gradients on cuda:{device} are quantized by torch's operators, which is slow: {reason}"
    )
    assert message.endswith(f"pip install {remedy} has what this torch (CUDA {cuda}) needs")
