"""The CUDA kernels on a GPU: the bits of the CPU, on streams and in graphs, without blocking."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_cases import LAYOUTS, affine_everything, differences, everything, inputs, inputs_of

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.kernels.dispatch import backend_for

pytestmark = pytest.mark.gpu
INT8 = Layout("int8", 128)


@pytest.fixture(scope="module")
def gpu():
    """Return the kernels of GPU 0. If they do not work, the tests fail here."""
    found = backend_for(torch.device("cuda", 0))
    assert isinstance(found, CudaKernels), kernels.describe()
    return found


# One test for each, in parallel with pytest-xdist: each compiles about thirty programs, a second each.
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("dtype", kernels.VALUE_DTYPES)
def test_blocks_have_the_bits_of_the_cpu(gpu, dtype, layout):
    block = layout.block_size
    for length in (1, block - 1, block, block + 1, 5 * block, 1009):
        for name, values in inputs_of(layout, dtype, length):
            found = everything(gpu, layout, values.cuda())
            assert differences(found, everything(torch_ops, layout, values)) == {}, (length, name)


@pytest.mark.parametrize("dtype", kernels.VALUE_DTYPES)
def test_torchs_operators_have_the_same_bits_on_a_gpu(dtype):
    for layout in LAYOUTS:
        for name, values in inputs(dtype, 1009):
            found = everything(torch_ops, layout, values.cuda())
            assert differences(found, everything(torch_ops, layout, values)) == {}, (layout, name)


@pytest.mark.parametrize("dtype", kernels.VALUE_DTYPES)
def test_affine_numbers_have_the_bits_of_the_cpu(gpu, dtype):
    for channel, length in {1: 999, 512: 20_000, 777: 20_003, 8193: 50_000, 10**6: 3 * 10**6}.items():
        layout = AffineLayout(length, channel, torch.float32)
        for name, values in inputs(dtype, length):
            found = affine_everything(gpu.affine_encode, gpu.affine_decode, layout, values.cuda())
            expected = affine_everything(torch_ops.affine_encode, torch_ops.affine_decode, layout, values)
            assert differences(found, expected) == {}, (channel, name)


def _there_and_back(values, messages, mean, restored):
    for message in messages:
        kernels.encode(values, message, INT8)
    kernels.reduce(messages, INT8, values.numel(), mean, INT8)
    kernels.decode([mean], INT8, restored)


def _tensors(values):
    messages = [
        torch.zeros(INT8.message_bytes(values.numel()), dtype=torch.uint8, device="cuda") for _ in "abc"
    ]
    return messages[:2], messages[2], torch.zeros_like(values)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.usefixtures("gpu")
def test_launches_go_to_the_current_stream_without_waiting():
    values, stream = torch.randn(10**6, device="cuda"), torch.cuda.Stream()
    messages, mean, restored = _tensors(values)
    _there_and_back(values, messages, mean, restored)
    expected = restored.clone()
    restored.zero_()
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10**8)
            _there_and_back(values, messages, mean, restored)
        assert not stream.query(), "the kernels are behind what the stream had to do"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(restored, expected)


@pytest.mark.usefixtures("gpu")
def test_kernels_can_be_captured_in_a_graph():
    values = torch.randn(10**5, device="cuda")
    messages, mean, restored = _tensors(values)
    _there_and_back(values, messages, mean, restored)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _there_and_back(values, messages, mean, restored)
    values.copy_(torch.randn(10**5))
    graph.replay()
    replayed = restored.clone()
    _there_and_back(values, messages, mean, restored)
    assert torch.equal(replayed, restored)


@pytest.mark.usefixtures("gpu")
def test_a_thread_without_a_context_can_launch():
    values = torch.randn(1000, device="cuda")
    messages, mean, restored = _tensors(values)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(_there_and_back, values, messages, mean, restored).result()
    torch.cuda.synchronize()
    assert (restored - values).abs().max() < 0.1


PROGRAM = """
import torch
from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import AffineLayout, Layout
for layout in (Layout("int8", 128), Layout("int8", 64), Layout("int4", 32), Layout("int8", 1024)):
    for dtype in kernels.VALUE_DTYPES:
        n = 5 * layout.block_size - 3
        values = torch.ones(n, dtype=dtype, device="cuda")
        residual, lost = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        out = [torch.empty(layout.message_bytes(n), dtype=torch.uint8, device="cuda") for _ in "abc"]
        for message in out[:2]:
            kernels.encode(values, message, layout, residual=residual, new_residual=lost)
        kernels.reduce(out[:2], layout, n, out[2], layout)
        kernels.decode(out, layout, values)
        assert (values == 1).all(), values
for channel in (7, 512, 20000):
    layout = AffineLayout(30001, channel, torch.float32)
    message = torch.zeros(layout.message_bytes, dtype=torch.uint8, device="cuda")
    values = torch.ones(30001, device="cuda")
    kernels.affine_encode(values, message, layout)
    kernels.affine_decode([message, message], layout, values)
    assert torch.allclose(values, torch.ones_like(values)), values
"""


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_compute_sanitizer_finds_nothing(gpu, tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer, of the CUDA toolkit, is not on the PATH")
    del gpu  # compiled and cached, so that the sanitizer need not watch compilation
    # Calls that query the driver for missing features are not errors of the kernels.
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    done = subprocess.run(
        [sanitizer, *options, sys.executable, "-W", "ignore", "-c", PROGRAM],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        },  # so that every tensor's bounds are watched
    )
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, done.stdout + done.stderr
