"""Products of gradients and factors: every backend gives the same bits, near those of fp64."""

import itertools

import pytest
import torch
from emulated_gpu import EmulatedGpu, needs_compiler
from kernel_backends import SETS, computed_by, needs_library

from ddp_quant_hooks.kernels import VALUE_DTYPES, dispatch, torch_ops
from ddp_quant_hooks.kernels.cpu import CpuKernels
from ddp_quant_hooks.kernels.low_rank import FactorCall, Matrix

SHAPES = [(1, 1), (3, 16), (17, 5), (64, 33), (255, 40), (256, 16), (257, 600), (7, 1100), (600, 31)]
RANKS = [1, 2, 3, 4, 7, 8, 16]


def _inputs(rows, columns, rank, dtype=torch.float32, seed=0, residual=True):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    matrix = Matrix(
        normal(rows, columns).to(dtype), (3 * normal(rows, columns)).bfloat16() if residual else None
    )
    return matrix, normal(rank, rows), normal(rank, columns), normal(rank, columns)


def _everything(backend, matrix, left, right, mean_right):
    """Return what a backend writes, by name."""
    found = {
        "multiply": torch.empty_like(left),
        "multiply_transposed": torch.empty_like(right),
        "left": torch.empty_like(left),
        "weights": torch.empty_like(left),
        "next_right": torch.empty_like(right),
        "values": matrix.values.clone(),
        "new_residual": torch.empty_like(matrix.values, dtype=torch.bfloat16),
    }
    written = Matrix(found["values"], matrix.residual)
    calls = [
        FactorCall.multiply(matrix, right, found["multiply"]),
        FactorCall.multiply_transposed(matrix, left, found["multiply_transposed"]),
        FactorCall.find_basis(left, found["left"], found["weights"]),
        FactorCall.follow(left, mean_right, found["next_right"]),
        FactorCall.restore(written, left, right, mean_right, found["new_residual"]),
    ]
    with computed_by(backend):
        dispatch.run_on_factors(calls)
    return found


def _differences(found, expected):
    return [
        name
        for name in expected
        if not (
            torch.equal(found[name].nan_to_num(), expected[name].nan_to_num())
            and torch.equal(found[name].isnan(), expected[name].isnan())
            and torch.equal(
                found[name].signbit() | found[name].isnan(), expected[name].signbit() | expected[name].isnan()
            )
        )
    ]


@needs_library
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_every_instruction_set_gives_the_bits_of_torchs_operators(rows, columns, dtype):
    for rank in RANKS:
        inputs = _inputs(rows, columns, rank, dtype, seed=rank, residual=rank % 2 == 1)
        expected = _everything(torch_ops, *inputs)
        for name in SETS:
            assert _differences(_everything(CpuKernels(name), *inputs), expected) == [], (rank, name)


def _extremes(dtype):
    """Return inputs of which some are not finite, or too large for a sum, a product or a dtype."""
    matrix, left, right, mean_right = _inputs(37, 530, 3, dtype)
    largest = torch.finfo(dtype).max
    for place, value in enumerate((torch.inf, -torch.inf, torch.nan, largest, -largest)):
        matrix.values[place::7, 41 * place + 3 :: 97] = value
    matrix.residual[3::7] = 3e37
    matrix.residual[4::7] = -3e37
    mean_right[:, ::5] *= largest / 4  # products beyond the largest number
    mean_right[1, ::50] = torch.inf  # and infinities of both signs, which add up to NaN
    left[1, ::2], left[2, ::2] = 1.0, -1.0
    mean_right[2, ::50] = torch.inf
    return matrix, left, right, mean_right


@needs_library
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_numbers_that_are_not_finite_have_one_form_everywhere(dtype):
    inputs = _extremes(dtype)
    expected = _everything(torch_ops, *inputs)
    assert expected["values"].isnan().any()
    for name in SETS:
        found = _everything(CpuKernels(name), *inputs)
        assert _differences(found, expected) == [], name
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(found["values"].view(bits), expected["values"].view(bits)), name


@needs_library
@needs_compiler
def test_factors_that_are_not_finite_have_the_same_bits_everywhere(tmp_path):
    matrix, left, right, mean_right = _inputs(40, 300, 4)
    gpu = EmulatedGpu(tmp_path)
    for factor, value in itertools.product((left, mean_right), (torch.inf, -torch.inf, torch.nan)):
        before = factor[2, 7].item()
        factor[2, 7] = value
        expected = _everything(torch_ops, matrix, left, right, mean_right)
        assert expected["next_right"].isnan().any()
        for backend in (*map(CpuKernels, SETS), gpu):
            found = _everything(backend, matrix, left, right, mean_right)
            assert _differences(found, expected) == [], (value, backend)
        factor[2, 7] = before


@needs_compiler
@pytest.mark.parametrize("dtype", VALUE_DTYPES, ids=str)
def test_the_gpu_kernels_text_gives_the_bits_of_torchs_operators(tmp_path, dtype):
    gpu = EmulatedGpu(tmp_path)
    gpu.plan(lambda: _everything(gpu, *_inputs(2, 2, 1, dtype)))
    for rows, columns, rank in ((1, 1, 1), (17, 5, 3), (300, 33, 8), (9, 150, 10)):
        inputs = _inputs(rows, columns, rank, dtype, residual=rank != 3)
        assert _differences(_everything(gpu, *inputs), _everything(torch_ops, *inputs)) == [], (rows, rank)
