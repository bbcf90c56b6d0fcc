"""The GPU kernels as programs: NVRTC compiles all of them, to good code, and once; no GPU is needed."""

import io
import logging
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice, product

import pytest
import torch

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import Layout, dispatch
from ddp_quant_hooks.kernels.programs import affine_program, block_program, compile_program, source

ARCHITECTURES = ["sm_80", "sm_90", "sm_100", "sm_120"]
FORMATS = {"int8": 128, "int4": 32, "fp16": 128}
DTYPES = kernels.VALUE_DTYPES


def _every_program():
    """Yield every kernel for every dtype and format, and for short and long blocks."""
    for dtype, (kind, block) in product(DTYPES, FORMATS.items()):
        yield block_program(Layout(kind, block), dtype=dtype, shards=2)
        yield block_program(Layout(kind, block), dtype=dtype, ranks=2)
    for kind, block in FORMATS.items():  # with memory at any address
        layout = Layout(kind, block)
        yield block_program(layout, dtype=torch.float32, aligned=False)
        yield block_program(layout, ranks=2, aligned=False)
        yield block_program(layout, dtype=torch.bfloat16, ranks=1, aligned=False)
        yield block_program(layout, dtype=torch.float32, shards=2, residuals=True)
        yield block_program(layout, ranks=2, residuals=True)
        yield block_program(layout, dtype=torch.bfloat16, aligned=False, residuals=True)
    for kind, block in FORMATS.items():
        for new in FORMATS:
            yield block_program(Layout(kind, block), Layout(new, block), ranks=4)
    for kind, block, ranks in [("int8", 128, 2), ("int8", 128, 8), ("int4", 32, 8), ("int8", 128, 100)]:
        yield block_program(Layout(kind, block), ranks=ranks)
    for kind, block in [("int8", 64), ("int8", 1024), ("fp16", 512)]:
        layout = Layout(kind, block)
        yield block_program(layout, dtype=torch.bfloat16)
        yield block_program(layout, ranks=3)
        yield block_program(layout, dtype=torch.float32, ranks=3)
    yield block_program(Layout("int8", 128), dtype=torch.float32, shards=40, ranks=2)
    yield from _every_program_that_rotates()
    for dtype in DTYPES:
        for name in ("encode_short_channels", "find_extremes_of_long_channels", "encode_long_channels"):
            yield affine_program(name, dtype)
        yield affine_program("decode", dtype, ranks=8)
        yield affine_program("encode_short_channels", dtype, aligned=False)
        yield affine_program("decode", dtype, ranks=2, aligned=False)


def _every_program_that_rotates():
    for kind, block in [("int8", 128), ("int4", 32), ("int8", 512)]:
        layout = Layout(kind, block, rotate=True)
        for dtype in DTYPES:
            yield block_program(layout, dtype=dtype)
            yield block_program(layout, dtype=dtype, ranks=2)
        for new_layout, ranks in [(layout, 2), (layout, 8), (layout, 100), (Layout("fp16", block), 4)]:
            yield block_program(layout, new_layout, ranks=ranks)
        yield block_program(layout, dtype=torch.float32, residuals=True)
        yield block_program(layout, ranks=2, residuals=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DDP_QUANT_HOOKS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def _compiler():
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")


@pytest.mark.usefixtures("_compiler")
@pytest.mark.parametrize(
    ("architecture", "step"),
    [
        pytest.param("sm_90", 6, id="sm_90, one of six"),
        *(pytest.param(name, 1, id=name, marks=pytest.mark.exhaustive) for name in ARCHITECTURES),
    ],
)
def test_every_kernel_compiles_and_keeps_everything_in_registers(architecture, step):
    def report(program):
        logs = io.StringIO()
        assert compile_program(program, architecture, logs=logs, use_cache=False).startswith(b"\x7fELF")
        return program.call, logs.getvalue()

    with ThreadPoolExecutor(2) as pool:
        for call, text in pool.map(report, islice(_every_program(), 0, None, step)):
            used = re.findall(r"(\d+) bytes (stack frame|spill stores|spill loads)", text)
            assert sorted(used) == [("0", "spill loads"), ("0", "spill stores"), ("0", "stack frame")], call
            (registers,) = re.findall(r"Used (\d+) registers", text)
            # As many as leave room for 512 threads on a multiprocessor.
            assert int(registers) <= 128, call


def _assembly(program):
    """Return a program as PTX, which cuda-core compiles only with a driver."""
    from cuda.bindings import nvrtc  # noqa: PLC0415 - optional

    _, compiled = nvrtc.nvrtcCreateProgram(program.text.encode(), b"kernel.cu", 0, [], [])
    flags = [b"--gpu-architecture=compute_90", b"--std=c++17", b"--fmad=false"]
    (code,) = nvrtc.nvrtcCompileProgram(compiled, len(flags), flags)
    assert code == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(compiled)
    text = b" " * size
    nvrtc.nvrtcGetPTX(compiled, text)
    return text.decode()


@pytest.mark.usefixtures("_compiler")
def test_memory_is_read_and_written_several_words_at_a_time():
    """16 bytes of values, 8 of messages; stores of single words would take as many times the transactions."""
    layout, read, write = Layout("int8", 128), "ld.global.v4.u32", "st.global.v4.b32"
    for program, expected in [
        (block_program(layout, dtype=torch.float32), {read}),
        (block_program(layout, dtype=torch.bfloat16), {read, "st.global.v2.b32"}),
        (block_program(layout, dtype=torch.bfloat16, residuals=True), {read, write}),
        (block_program(layout, ranks=2), {"ld.global.v2.u32", "st.global.v2.b32"}),
        (block_program(layout, dtype=torch.float32, ranks=1), {write}),
        (block_program(layout, dtype=torch.bfloat16, ranks=1), {"ld.global.v2.u32", write}),
        (affine_program("encode_short_channels", torch.float32), {read}),
        (affine_program("decode", torch.float32), {write}),
    ]:
        text = _assembly(program)
        assert {name for name in expected if name in text} == expected, program.call


@pytest.mark.usefixtures("_compiler")
def test_arithmetic_that_the_launch_relies_on_is_the_kernels_own():
    """A program asserts the numbers that Python computes: wrong ones do not compile."""
    layout = Layout("int8", 128)
    for right, number, wrong in (
        (block_program(layout, dtype=torch.float32), "kTeams == 8", "kTeams == 16"),
        (block_program(layout, dtype=torch.float32), "sizeof(Shard) == 40", "sizeof(Shard) == 48"),
        (affine_program("decode", torch.float32), "sizeof(Work<1>) == 48", "sizeof(Work<1>) == 56"),
    ):
        assert number in right.checks
        with pytest.raises(Exception, match="static assertion failed"):
            compile_program(replace(right, checks=right.checks.replace(number, wrong)), "sm_90")


def _seconds(program):
    began = time.thread_time()  # without the machine's other work
    code = compile_program(program, "sm_90")
    return code, time.thread_time() - began


@pytest.mark.usefixtures("_compiler")
def test_compiled_programs_are_cached_and_damaged_ones_replaced(tmp_path, caplog):
    program = block_program(Layout("int8", 128), dtype=torch.float32, ranks=1)
    code, first = _seconds(program)
    again, second = _seconds(program)
    assert again == code
    assert second < first / 4
    assert compile_program(program, "sm_80") != code
    entries = [
        path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.stat().st_size > 1000
    ]
    assert len(entries) == 2
    for damage in (lambda data: data[:-100], lambda data: data[:500] + b"x" + data[501:], lambda _: b""):
        for path in entries:
            path.write_bytes(damage(path.read_bytes()))
        caplog.clear()
        assert compile_program(program, "sm_90") == code
        assert "damaged" in caplog.text
    caplog.clear()
    assert compile_program(program, "sm_90") == code
    assert not caplog.text


@pytest.mark.usefixtures("_compiler")
def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DDP_QUANT_HOOKS_CACHE", str(tmp_path / "file" / "cache"))
    assert compile_program(affine_program("decode", torch.float32), "sm_90")
    assert "not kept on disk" in caplog.text


@pytest.mark.usefixtures("_compiler")
def test_ranks_that_start_together_share_one_cache(tmp_path):
    program = (
        "import hashlib, torch\n"
        "from ddp_quant_hooks.kernels import Layout\n"
        "from ddp_quant_hooks.kernels.programs import block_program, compile_program\n"
        "for kind in ('int8', 'int4'):\n"
        "    p = block_program(Layout(kind, 64), dtype=torch.float32)\n"
        "    print(hashlib.sha256(compile_program(p, 'sm_90')).hexdigest())\n"
    )
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
    assert len(set(outputs)) == 1
    assert len(set(outputs[0].split())) == 2


@pytest.mark.usefixtures("_compiler")
def test_a_gpu_that_does_not_work_is_named_once_with_the_remedy(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(dispatch, "CudaKernels", _broken)
    reason = dispatch._cuda_kernels.__wrapped__(0)
    assert reason.startswith("cuda-core does not work here: no kernel image")
    (message,) = caplog.messages
    assert message.startswith(
        "gradients on cuda:0 are quantized by torch's operators, which is slow: cuda-core"
    )
    assert message.endswith("pip install 'ddp-quant-hooks[cuda]' has what this torch (CUDA 13.0) needs")


def _broken(device):
    raise RuntimeError("no kernel image")


def test_without_cuda_core_it_says_how_to_get_it(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    caplog.set_level(logging.WARNING)
    reason = dispatch._cuda_kernels.__wrapped__(0)
    assert reason.startswith("cuda-core is not installed; pip install 'ddp-quant-hooks[cuda12]'")
    assert len(caplog.messages) == 1


def test_a_program_includes_nothing():
    for file in ("block_kernels.cu", "affine_kernels.cu"):
        assert '#include "' not in source(file)
        assert source(file).count("BLOCK_MATH uint32_t bits_of(") == 1, "each file once"
