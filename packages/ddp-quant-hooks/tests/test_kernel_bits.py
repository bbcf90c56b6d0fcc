"""Every backend that computes on the CPU gives the same bits, on every kind of value and layout."""

import threading
from itertools import cycle

import pytest
import torch
from kernel_backends import SETS, needs_library
from kernel_cases import (
    LAYOUTS,
    affine_everything,
    differences,
    everything,
    inputs_of,
    inputs_to_rotate,
    random_values,
)

from ddp_quant_hooks import kernels
from ddp_quant_hooks.kernels import VALUE_DTYPES, AffineLayout, Layout, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from dist_utils.testing import run_ranks

INT8 = Layout("int8", 128, rotate=True)


@needs_library
@pytest.mark.parametrize(("layout", "dtype"), [*zip(LAYOUTS, cycle(VALUE_DTYPES), strict=False)], ids=str)
def test_every_instruction_set_gives_the_bits_of_torchs_operators(layout, dtype):
    backends = {name: CpuKernels(name) for name in SETS}
    for name, values in inputs_of(layout, dtype, 1009):  # other lengths: test_kernel_fuzz.py
        expected = everything(torch_ops, layout, values)
        for instruction_set, backend in backends.items():
            found = everything(backend, layout, values)
            assert differences(found, expected) == {}, (instruction_set, name)


def _computed(values):
    """Return what torch's operators compute, with tensors of their own; the compiled kernels have none."""
    affine = AffineLayout(values.numel(), 500, torch.float32)
    return [
        everything(torch_ops, Layout("int8", 128, rotate=True), values),
        everything(torch_ops, Layout("int4", 32), values),
        affine_everything(torch_ops.affine_encode, torch_ops.affine_decode, affine, values),
    ]


def _computed_by_default(_, values):
    """Compute in a program that has made other dtypes and devices the default, before anything is cached."""
    computed = []
    for dtype, device in ((torch.bfloat16, "meta"), (torch.float64, "cpu")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        computed.append(_computed(values))
    torch.set_default_device("cpu")
    torch.set_default_dtype(torch.float32)
    return computed


def test_neither_the_default_dtype_nor_the_default_device_changes_a_bit():
    values = dict(inputs_to_rotate(torch.float32, 4000))["heavy tails"]
    expected = _computed(values)
    assert (INT8.scales(expected[0]["plain"], 4000) < 0).any(), "nothing was rotated"
    ((in_bf16, in_fp64),) = run_ranks(_computed_by_default, 1, values, backend=None)
    for found in (in_bf16, in_fp64):
        assert [differences(*pair) for pair in zip(found, expected, strict=True)] == [{}] * 3


def _products_around_kernels(rank, threads):
    """Matrix products in a thread other than the main one, before and after a kernel has run there."""
    torch.manual_seed(0)
    wide, tall = torch.randn(37, 5011), torch.randn(5011, 41)
    torch.set_num_threads(threads)
    found = []

    def loop():
        found.append(wide @ tall)
        kernels.encode(wide.view(-1), torch.empty(INT8.message_bytes(wide.numel()), dtype=torch.uint8), INT8)
        found.append(wide @ tall)

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    return found


@needs_library
@pytest.mark.parametrize("threads", [1, 3])
def test_kernels_leave_the_bits_of_their_threads_products(threads, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")  # else other threads than the main one may agree by chance
    ((before, after),) = run_ranks(_products_around_kernels, 1, threads, backend=None)
    assert torch.equal(before, after)


@needs_library
def test_neither_threads_nor_flushing_change_a_bit():
    values = random_values(1_000_003, 0) * 1e-38
    threads, compiled = torch.get_num_threads(), CpuKernels()
    try:
        torch.set_num_threads(1)
        expected = everything(compiled, INT8, values)
        torch.set_num_threads(3)
        assert differences(everything(compiled, INT8, values), expected) == {}
        torch.set_num_threads(1)
        if torch.set_flush_denormal(True):
            message, restored = torch.full_like(expected["plain"], 7), torch.empty_like(values)
            kernels.encode(values, message, INT8)
            kernels.decode([message], INT8, restored)
            torch.set_flush_denormal(False)
            found = {"plain": message, "mean of 1": restored}
            assert differences(found, {name: expected[name] for name in found}) == {}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
