"""The CUDA backend's calls of the driver through cuda-bindings, without NVIDIA's driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

COMPILER = next(filter(shutil.which, ("cc", "gcc", "clang")), None)

PROGRAM = """
import types
import torch
from cuda.bindings import driver
from ddp_quant_hooks.kernels import AffineLayout, Layout
from ddp_quant_hooks.kernels.cuda import CudaKernels
from ddp_quant_hooks.kernels.job import Job

stream = types.SimpleNamespace(cuda_stream=0x1234)
current, switches = [0], []

class Switch:
    def __init__(self, index):
        self.index = index

    def __enter__(self):
        self.before, current[0] = current[0], self.index
        switches.append(self.index)

    def __exit__(self, *error):
        current[0] = self.before

torch.cuda.current_device = lambda: current[0]
torch.cuda.device = Switch
torch.cuda.current_stream = lambda device: stream
gpu = CudaKernels.__new__(CudaKernels)
gpu._driver, gpu._device = driver, torch.device("cuda", 0)
gpu._kernel = lambda program: (None, driver.CUfunction(0xabc))

layout, values = Layout("int8", 128), torch.zeros(100_000)
def message(count):
    return torch.zeros(layout.message_bytes(count), dtype=torch.uint8)
lengths = [50_048, 0, 49_952]
print(f"{values.data_ptr():x}", flush=True)
gpu.run(Job(lengths, values, (), layout, [message(length) for length in lengths], layout))
gpu.run(Job([100_000], values, [[message(100_000)] * 2], layout, (), layout))
gpu.run(Job([1000], None, [[message(1000)] * 3], layout, [message(1000)], layout))
assert not switches
current[0] = 1
gpu.affine_encode(values, torch.zeros(110_000, dtype=torch.uint8), AffineLayout(100_000, 512, torch.float32))
assert switches == [0] and current == [1]
stream.cuda_stream = 0xbad
try:
    gpu.run(Job([100_000], values, [[message(100_000)]], layout, (), layout))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C compiler, on Linux")
def test_grids_streams_and_arguments_reach_the_driver(tmp_path):
    pytest.importorskip("cuda.bindings", reason="needs cuda-core: pip install 'ddp-quant-hooks[cuda]'")
    stub = Path(__file__).with_name("stub_driver.c")
    command = [COMPILER, "-shared", "-fPIC", str(stub), "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run(command, check=True)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-u", "-c", PROGRAM],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    first, *launches, error = done.stdout.splitlines()
    address = f"0x{first}"
    rows = [line.split() for line in launches[:-1]]
    # kernel, grid, threads of a thread block, shared memory, stream, no extra, then the beginning of the work
    always = {"kernel": "0xabc", "depth": "1", "rows": "1", "layers": "1", "shared": "0", "stream": "0x1234"}
    for row in rows:
        assert [row[0], row[3], row[5], row[6], row[7], row[8], row[9]] == [*always.values(), "1"]
    assert [[row[1], row[2], row[4], *row[10:]] for row in rows] == [
        ["49", "2", "128", "50048", address],  # 391 blocks of 16 lanes each, and 391
        ["98", "1", "128", "100000", address],
        ["1", "1", "128", "1000", "(nil)"],  # reduce has no tensor
        ["196", "1", "128", "100000", "0x200"],  # a thread block for each channel of 512
    ]
    assert (
        error
        == "decode<Float32, Int8, 128, true, false, 1, 1> did not start on cuda:0: CUDA_ERROR_INVALID_HANDLE"
    )
