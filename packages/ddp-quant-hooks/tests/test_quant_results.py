"""The averaged bucket has the bits of the formula, in place, on 2, 3 and 4 ranks."""

import pytest
import torch
import torch.distributed as dist
from quant_buckets import STATES, make_state, run_hook, simulate

import ddp_quant_hooks.states
from ddp_compress_hooks import allreduce_hook
from ddp_quant_hooks import QuantizedAllreduceState, quantized_allreduce_hook
from ddp_quant_hooks.kernels import VALUE_DTYPES
from dist_utils.testing import grad_bucket, run_ranks, same_bits

LENGTHS = (1, 127, 128, 129, 1009, 128 * 40 + 1)
LARGEST = torch.finfo(torch.float32).max


def _special_inputs(world_size, length=1009):
    """Yield a name and every rank's values."""
    generator = torch.Generator().manual_seed(length)
    noise = [torch.randn(length, generator=generator) for _ in range(world_size)]
    yield "zeros", [torch.zeros(length)] * world_size
    yield "constant", [torch.full((length,), -0.3)] * world_size
    yield "different constants", [torch.full((length,), float(rank + 1)) for rank in range(world_size)]
    yield "tiny", [values * 1e-30 for values in noise]
    yield "subnormal", [values * 1e-41 for values in noise]
    yield "huge", [values.sign() * 3e38 for values in noise]
    yield "largest", [torch.full((length,), LARGEST)] * world_size
    yield "one rank only", [noise[0]] + [torch.zeros(length)] * (world_size - 1)
    for name, special in (("nan", torch.nan), ("infinity", torch.inf)):
        values = [part.clone() for part in noise]
        values[-1][500] = special
        yield name, values


def _bits(rank):
    """Compare every kind of bucket with the formula; return how many were compared."""
    world_size, compared = dist.get_world_size(), 0
    bucket = grad_bucket([torch.ones(3)])
    for name in STATES:
        for dtype in VALUE_DTYPES:
            for length in LENGTHS:
                state = make_state(name)  # error feedback starts again
                inputs = [
                    torch.randn(length, generator=torch.Generator().manual_seed(10 * length + peer)).to(dtype)
                    for peer in range(world_size)
                ]
                expected = simulate(state, inputs)
                assert same_bits(run_hook(state, bucket, inputs[rank].clone()), expected), (
                    name,
                    dtype,
                    length,
                )
                compared += 1
                state.close()
    for name, inputs in _special_inputs(world_size):
        state = make_state("int8")
        expected = simulate(state, inputs)
        assert same_bits(run_hook(state, bucket, inputs[rank].clone()), expected), name
        finite = all(bool(values.isfinite().all()) for values in inputs)
        assert bool(expected.isfinite().all()) == finite, name
        if not finite:
            # NaN in the block of the value, and in no other, on every rank.
            assert expected.isnan().nonzero().flatten().tolist() == list(range(384, 512)), name
        if name in {"zeros", "constant", "largest"}:
            assert torch.equal(expected, inputs[0]), name
        state.close()
        compared += 1
    return compared


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_every_bucket_gets_the_bits_of_the_formula_on_every_rank(world_size):
    compared = run_ranks(_bits, world_size, timeout=150)
    assert compared == [len(STATES) * len(VALUE_DTYPES) * len(LENGTHS) + 10] * world_size


def _chunks(rank):
    """Average a bucket of many chunks in flight; the last has fewer blocks than there are ranks."""
    ddp_quant_hooks.exchange.levels._CHUNK_VALUES = 1000
    bucket, state = grad_bucket([torch.ones(3)]), make_state("int8")
    inputs = [
        torch.randn(30_001, generator=torch.Generator().manual_seed(peer))
        for peer in range(dist.get_world_size())
    ]
    for _ in range(5):
        assert same_bits(run_hook(state, bucket, inputs[rank].clone()), simulate(state, inputs))
    (plan,), (pool,) = state.averager._plans.values(), state.averager._scratches.values()
    return len(plan.chunks), len(pool)


@pytest.mark.parametrize("world_size", [2, 3])
def test_chunks_in_flight_change_no_bit_and_reuse_their_memory(world_size):
    for chunks, scratches in run_ranks(_chunks, world_size):
        assert chunks > 20
        assert scratches <= 3


def _paths(rank):
    """Return the state's statistics for buckets that are averaged in different ways."""
    bucket = grad_bucket([torch.ones(3)])
    world_size = dist.get_world_size()
    state = QuantizedAllreduceState(min_bytes=1000)
    results = {}
    small = torch.arange(200.0) + rank
    results["small"] = run_hook(state, bucket, small), torch.arange(200.0) + (world_size - 1) / 2
    double = torch.randn(500, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    exact = double.clone()
    dist.all_reduce(exact)
    results["double"] = run_hook(state, bucket, double), exact / world_size
    empty = torch.empty(0)
    results["empty"] = run_hook(state, bucket, empty), empty
    for what, (result, expected) in results.items():
        torch.testing.assert_close(result, expected, rtol=1e-15 if what == "double" else 1e-6, atol=1e-15)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2 + rank]]), torch.ones(2), (10,))
    bucket.set_buffer(sparse)
    mean = quantized_allreduce_hook(state, bucket).wait().to_dense()
    assert mean[0] == 1
    assert mean[2 + rank] == pytest.approx(1 / world_size)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(rank))
    numbers = torch.view_as_complex(values.clone().view(-1, 2))
    as_reals = run_hook(state, bucket, values)
    assert torch.equal(torch.view_as_real(run_hook(state, bucket, numbers)).view(-1), as_reals)
    statistics = state.statistics
    assert (statistics.quantized_buckets, statistics.plain_buckets) == (2, 3)
    assert 0 < statistics.bytes_saved < statistics.bytes_of_allreduce
    bucket.set_buffer(torch.ones(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="floating-point"):
        quantized_allreduce_hook(state, bucket)
    with pytest.raises(TypeError, match="needs a QuantizedAllreduceState"):
        quantized_allreduce_hook(None, bucket)
    with pytest.raises(TypeError, match="Python reducer"):
        quantized_allreduce_hook(state, (torch.ones(1), torch.ones(1)))


def test_small_double_sparse_and_empty_buckets_are_averaged_without_compression():
    run_ranks(_paths, 3)


def _exact_parameters(rank):
    """Average weights in 8 bits and biases exactly; the bias is a million times larger."""
    world_size = dist.get_world_size()
    shapes = [(20, 30), (20,), (10, 20), ()]
    gradients = [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * (1 if len(shape) > 1 else 1e6)
        for shape in shapes
    ]
    exact = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(exact)
    exact /= world_size
    bucket = grad_bucket(gradients)
    state = QuantizedAllreduceState(min_bytes=0, exact_1d=True, sample_every=1)
    result = quantized_allreduce_hook(state, bucket).wait()
    ends = torch.tensor([gradient.numel() for gradient in gradients]).cumsum(0).tolist()
    for start, end, shape in zip([0, *ends], ends, shapes, strict=False):
        part, expected = result[start:end], exact[start:end]
        if len(shape) > 1:
            assert (part - expected).norm() < 2e-2 * expected.norm(), "disturbed by its neighbor"
        else:
            torch.testing.assert_close(part, expected, rtol=1e-6, atol=0)
    assert 0 < state.statistics.relative_error < 2e-2
    only_biases = grad_bucket([torch.full((500,), float(rank))])
    assert torch.equal(
        quantized_allreduce_hook(state, only_biases).wait(), torch.full((500,), (world_size - 1) / 2)
    )
    assert state.statistics.plain_buckets == 1
    sparse = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (10,))
    only_biases.set_buffer(sparse)
    assert quantized_allreduce_hook(state, only_biases).wait().to_dense()[0] == 1


def _extremes(rank):
    """The largest 16-bit values: means and residuals may not push them out of the range."""
    bucket = grad_bucket([torch.ones(3)])
    for dtype in (torch.float16, torch.bfloat16):
        largest = torch.finfo(dtype).max
        values = (torch.tensor([1.0, 0.9987] * 300) * largest).to(dtype)
        for name in ("int8", "feedback both", "int4"):
            state = make_state(name)
            for _ in range(3):
                result = run_hook(
                    state, bucket, values.clone() * (1 if rank else -1) if name == "int8" else values.clone()
                )
                assert result.isfinite().all(), (dtype, name)
            state.close()


def test_16_bit_extremes_stay_finite():
    run_ranks(_extremes, 2)


def test_parameters_of_one_dimension_are_exact_if_asked_for():
    run_ranks(_exact_parameters, 3)


def _alone(rank):
    del rank
    bucket, values = grad_bucket([torch.ones(3)]), torch.randn(1000)
    before = values.clone()
    state = make_state("int8")
    assert torch.equal(run_hook(state, bucket, values), before)
    assert state._worker is None
    group = dist.new_group([0])
    assert torch.equal(run_hook(make_state("int8", group), bucket, values), before)
    allreduce_hook(None, bucket).wait()


def test_one_rank_alone_keeps_its_gradients():
    run_ranks(_alone, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 2}, "bits must be 8 or 4, got 2"),
        ({"block_size": 96}, r"one of \(32, 64, 128, 256, 512, 1024\), got 96"),
        ({"block_size": 2048}, r"one of \(.*\), got 2048"),
        ({"gather": "fp8"}, "gather must be 'int8', 'int4' or 'fp16', got 'fp8'"),
        ({"gather": "int4"}, "needs bits=4"),
        ({"error_feedback": "all"}, "error_feedback must be"),
        ({"min_bytes": -1}, "min_bytes must be a number of at least 0, got -1"),
        ({"sample_every": -1}, "sample_every must be"),
    ],
)
def test_options_that_do_not_exist_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizedAllreduceState(**options)
